"""Effects of each part of a recipe: pairs of rows that differ only in it or in their sharding."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from harness.report.data.rows import Group, Row
from harness.report.figures import derive
from harness.report.figures.units import ALL_CATEGORIES, column, in_sentence, one

NUMBERED = re.compile(r"(\D+)(\d+)(?=_|$)")


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The effect of adding ``part`` to the recipe of the row ``base``.

    ``replaced`` is the part that it replaces, if any.
    """

    part: str
    base: Row
    row: Row
    replaced: str = ""

    @property
    def words(self) -> str:
        """The part, and the part that it replaces."""
        return f"{self.part} (in place of {self.replaced})" if self.replaced else self.part

    @property
    def need_change_fraction(self) -> float | None:
        """The change as a fraction of the base's need; None if one need is unknown."""
        needs = (self.row.numbers.need_bytes, self.base.numbers.need_bytes)
        return needs[0] / needs[1] - 1 if all(needs) else None


def effects(group: Group) -> list[Effect]:
    """Return all pairs of rows on equally many processes that differ in one added part.

    Pairs that differ only in their sharding come first.
    """
    pairs = sorted(_added(group.rows), key=lambda effect: (effect.part, effect.base.versus.place))
    return [*_sharded(group), *pairs]


def _added(rows: list[Row]) -> list[Effect]:
    bases: dict[tuple[frozenset[str], int], list[Row]] = {}
    for row in rows:
        bases.setdefault((frozenset(_words(row)), row.spec.processes), []).append(row)
    return [
        Effect(part=part, base=base, row=row)
        for (more, processes), same in bases.items()
        for part in more
        for base in bases.get((more - {part}, processes), ())
        for row in same
    ]


def _sharded(group: Group) -> list[Effect]:
    """Return the pairs that differ in their sharding, those with the fewest other parts first."""
    found: list[Effect] = []
    others: Parts = {}
    for row in group.rows:
        sharding, *rest = _words(row)
        others.setdefault((tuple(rest), row.spec.processes), {})[sharding] = row
    for row in sorted(group.rows, key=lambda row: (len(_words(row)), _words(row)[1:], row.label)):
        base = _other_sharding(row, group, others)
        if base is not None:
            found.append(Effect(part=_words(row)[0], base=base, row=row, replaced=_words(base)[0]))
    return found


Parts = dict[tuple[tuple[str, ...], int], dict[str, Row]]
"""Other parts and processes -> sharding -> the row."""


def _other_sharding(row: Row, group: Group, parts: Parts) -> Row | None:
    """Return the row with the same other parts whose sharding is the base of comparison.

    The base is the variant's origin by name (zero2 for zero2_offload). Otherwise it is the next
    lower number (zero1 for zero2), or the reference's sharding.
    """
    sharding, *rest = _words(row)
    usual = _words(group.reference)[0]
    if sharding == usual:
        return None
    others = parts[tuple(rest), row.spec.processes]
    parsed = NUMBERED.match(sharding)  # zero, 2 of zero2 and zero2_offload
    kind, number = (parsed[1], int(parsed[2])) if parsed else (sharding, 0)
    lower = (f"{kind}{n}" for n in range(number - 1, 0, -1))
    names = (sharding.rpartition("_")[0], *lower, usual)
    return next((others[name] for name in names if name in others), None)


def _words(row: Row) -> list[str]:
    return row.spec.recipe.split("+")


SHOWN = 0.02
"""Share of the peak from which a change counts."""
MOVED = 0.03
"""Share of the peak before, from which a changed category is named."""
MOST_NAMED = 3


def why(effect: Effect) -> str | None:
    """Return the reason of an effect in words; None if one of the rows was not traced.

    It is in the traced tensors of one step on the fullest rank, before and after. All shares are
    of the peak before, so the changes of the categories add up to the change of the peak.
    """
    before, after = held_at_peak(effect.base), held_at_peak(effect.row)
    if not before or not after:
        return None
    whole = sum(before.values())
    change = sum(after.values()) / whole - 1
    moved = _moved(before, after, whole)
    if abs(change) >= SHOWN:
        texts = [f"{'saves' if change < 0 else 'costs'}: {moved or 'a little of everything'}"]
    else:
        largest = sorted(before, key=lambda name: -before[name])[:MOST_NAMED]
        parts = [f"{in_sentence(name)} {_share(before[name], whole)}" for name in largest]
        texts = [f"did not show: the peak is {', '.join(parts)}"]
        texts += [f"what changed cancels: {moved}"] if moved else []
        texts += _elsewhere(effect, whole)
    phases = [_phase(row) for row in (effect.base, effect.row)]
    if phases[0] != phases[1]:
        texts.append(f"the peak moved from {phases[0]} to {phases[1]}")
    return "; ".join([*texts, *_of_the_step(effect, change)])


def held_at_peak(row: Row) -> dict[str, int]:
    """Return category -> bytes at the traced peak of a step; empty for an untraced row."""
    sizes = {name: getattr(row.numbers, f"{name}_bytes") for name in ALL_CATEGORIES}
    return {} if None in sizes.values() else sizes


def _moved(before: Mapping[str, int], after: Mapping[str, int], whole: int) -> str:
    """Return each category that changed by at least ``MOVED`` of the whole, the largest first."""
    changes = {name: abs(after[name] - before[name]) / whole for name in before}
    named = [name for name, size in changes.items() if size >= MOVED]
    named.sort(key=lambda name: -changes[name])
    return ", ".join(
        f"{in_sentence(name)} {_share(before[name], whole)} -> {_share(after[name], whole)}"
        for name in named[:MOST_NAMED]
    )


def _share(size: float, whole: float) -> str:
    return f"{100 * size / whole:.0f} %"


def _elsewhere(effect: Effect, whole: int) -> list[str]:
    sizes = [row.numbers.beyond_state_bytes for row in (effect.base, effect.row)]
    if None in sizes or abs(sizes[1] - sizes[0]) < MOVED * whole:
        return []
    ends = " -> ".join(column("mib", sizes))
    return [f"away from the peak activations and temporaries went {ends} MiB at most"]


def _phase(row: Row) -> str:
    fullest = derive.fullest_rank([rank for result in row.results for rank in result.ranks])
    return fullest.categories.phase if fullest else ""


def _of_the_step(effect: Effect, change: float) -> list[str]:
    """Return the change of the step's tensors if it differs from the change of the need."""
    needs = [row.numbers.need_bytes for row in (effect.row, effect.base)]
    if not all(needs) or abs(needs[0] / needs[1] - 1 - change) < SHOWN:
        return []
    return [f"the step's tensors alone: {one('change', change)} %"]

"""Effects of each part of a recipe: pairs of rows that differ only in it or in their sharding."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.report.data.rows import Group, Row

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

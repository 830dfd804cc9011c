"""What each part of a recipe does: pairs of rows that differ in that part only, or in how the
training is sharded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.report.data.rows import Group, Row

__all__ = ["Effect", "effects"]


NUMBERED = re.compile(r"(\D+)(\d+)(?=_|$)")


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What adding ``part`` to the recipe of the row ``base`` did; ``replaced`` is the part that it
    took the place of, if any."""

    part: str
    base: Row
    row: Row
    replaced: str = ""

    @property
    def words(self) -> str:
        """The part, and what it is in place of."""
        return f"{self.part} (in place of {self.replaced})" if self.replaced else self.part

    @property
    def need_change_fraction(self) -> float | None:
        """Of what a device must have free for the base; None where one of the two is not known."""
        needs = (self.row.numbers.need_bytes, self.base.numbers.need_bytes)
        return needs[0] / needs[1] - 1 if all(needs) else None


def effects(group: Group) -> list[Effect]:
    """All pairs of rows, on equally many processes, that differ in one added part, and before them
    each row against the one that it differs from in its sharding alone."""
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
    """Those with the fewest other parts first, then by name."""
    found, others = [], _by_other_parts(group.rows)
    for row in sorted(group.rows, key=lambda row: (len(_words(row)), _words(row)[1:], row.label)):
        base = _other_sharding(row, group, others)
        if base is not None:
            found.append(Effect(part=_words(row)[0], base=base, row=row, replaced=_words(base)[0]))
    return found


Parts = dict[tuple[tuple[str, ...], int], dict[str, Row]]
"""Other parts and processes -> sharding -> the row."""


def _by_other_parts(rows: list[Row]) -> Parts:
    found: Parts = {}
    for row in rows:
        sharding, *rest = _words(row)
        found.setdefault((tuple(rest), row.spec.processes), {})[sharding] = row
    return found


def _other_sharding(row: Row, group: Group, parts: Parts) -> Row | None:
    """What a row's sharding is to be held against, with the same other parts: what its name says
    that it is a variant of (zero2 of zero2_offload), else the next lower of the same name and
    another number (zero1 of zero2), else the reference's."""
    sharding, *rest = _words(row)
    usual = _words(group.reference)[0]
    if sharding == usual:
        return None
    others = parts[tuple(rest), row.spec.processes]
    kind, number = _numbered(sharding)
    lower = (f"{kind}{n}" for n in range(number - 1, 0, -1))
    names = (sharding.rpartition("_")[0], *lower, usual)
    return next((others[name] for name in names if name in others), None)


def _numbered(sharding: str) -> tuple[str, int]:
    """``("zero", 2)`` of ``zero2``, and of ``zero2_offload``; 0 where a name has no number."""
    parts = NUMBERED.match(sharding)
    return (parts[1], int(parts[2])) if parts else (sharding, 0)


def _words(row: Row) -> list[str]:
    return row.spec.recipe.split("+")

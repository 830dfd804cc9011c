"""What each part of a recipe does: pairs of rows that differ in that part only."""

from __future__ import annotations

from dataclasses import dataclass

from harness.report.data.rows import Group, Row

__all__ = ["Effect", "effects"]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What adding ``part`` to the recipe of the row ``base`` did."""

    part: str
    base: Row
    row: Row

    @property
    def speed_ratio(self) -> float:
        """Samples a second as a multiple of the base's."""
        return self.row.numbers.samples_per_second / self.base.numbers.samples_per_second

    @property
    def need_change_fraction(self) -> float | None:
        """Of what a device must have free for the base; None where one of the two is not known."""
        needs = (self.row.numbers.need_bytes, self.base.numbers.need_bytes)
        return needs[0] / needs[1] - 1 if all(needs) else None


def effects(group: Group) -> list[Effect]:
    """All pairs of rows, on equally many processes, that differ in one added part."""
    parts = [(row, frozenset(row.spec.recipe.split("+"))) for row in group.rows]
    pairs = [
        Effect(part=next(iter(more - less)), base=base, row=row)
        for base, less in parts
        for row, more in parts
        if less < more and len(more - less) == 1 and base.spec.processes == row.spec.processes
    ]
    return sorted(pairs, key=lambda effect: (effect.part, effect.base.versus.rank))

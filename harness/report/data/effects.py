"""What each part of a recipe does: pairs of rows that differ in that part only."""

from __future__ import annotations

from dataclasses import dataclass

from harness.report.columns import Column
from harness.report.rows import Group, Row

__all__ = ["EFFECTS", "Effect", "effects"]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What adding ``part`` to the row ``base`` did: ratio of samples/s, change of the peak."""

    part: str
    base: Row
    row: Row


def effects(group: Group) -> list[Effect]:
    """All pairs of rows, on equally many processes, that differ in one added part."""
    parts = [(row, frozenset(row.spec.recipe.split("+"))) for row in group.rows]
    found = [
        Effect(part=next(iter(more - less)), base=base, row=row)
        for base, less in parts
        for row, more in parts
        if less < more and len(more - less) == 1 and base.spec.processes == row.spec.processes
    ]
    return sorted(found, key=lambda e: (e.part, e.base.versus.rank))


def _gain(pair: Effect) -> float:
    return pair.row.numbers.samples_per_second / pair.base.numbers.samples_per_second


def _saving(pair: Effect) -> float | None:
    peaks = (pair.row.numbers.peak_bytes, pair.base.numbers.peak_bytes)
    return peaks[0] / peaks[1] - 1 if all(peaks) else None


EFFECTS = (
    Column("Adding", lambda e: e.part),
    Column("to", lambda e: e.base.label),
    Column("Samples/s x", _gain, "ratio"),
    Column("Peak %", _saving, "change"),
)

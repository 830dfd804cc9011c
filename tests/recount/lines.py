"""What the lines of a table are about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.recount import measures as m
from tests.recount import predicted as p
from tests.recount import versus as v
from tests.recount.raw import Group, Row
from tests.recount.words import zero_block

__all__ = ["LINES"]


class Effect:
    """Two rows on equally many processes that differ in one added part."""

    def __init__(self, base: Row, row: Row) -> None:
        self.base, (self.part,) = base, row.parts - base.parts
        self.speed = m.samples_per_second(row) / m.samples_per_second(base)
        peaks = m.peak_bytes(row), m.peak_bytes(base)
        self.peak = peaks[0] / peaks[1] - 1 if all(peaks) else None


def effects(group: Group) -> list[Effect]:
    rows = v.ranked(group)
    pairs = [
        Effect(base, row)
        for base in rows
        for row in rows
        if base.parts < row.parts and len(row.parts - base.parts) == 1
        if base.spec["processes"] == row.spec["processes"]
    ]
    return sorted(pairs, key=lambda pair: pair.part)


def _rows(wanted: Callable[[Row], Any]) -> Callable[[Group], list[Row]]:
    return lambda group: [row for row in v.ranked(group) if wanted(row)]


def _parts(group: Group) -> Sequence[p.Part]:
    return [part for row in v.ranked(group) if p.prediction(row) for part in p.parts(row)]


LINES: dict[str, Callable[[Group], Sequence[Any]]] = {
    "What the peak is made of": _rows(m.fullest),
    "What the host holds": _rows(lambda row: any(r.get("host_categories") for r in row.ranks)),
    "Precision": _rows(m.types),
    "Predicted and measured": _rows(p.prediction),
    "Predicted and traced, by category": _parts,
    "DeepSpeed buckets": _rows(zero_block),
    "What each part does": effects,
}
"""Title -> the subjects of its lines, in order; every row, fastest first, where it is not here."""

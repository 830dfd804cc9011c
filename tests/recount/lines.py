"""What the lines of a table are about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.recount import drawn
from tests.recount import measures as m
from tests.recount import predicted as p
from tests.recount import versus as v
from tests.recount.effects import effects
from tests.recount.raw import Group, Row
from tests.recount.words import gathering, zero_block

__all__ = ["LINES"]


def _rows(wanted: Callable[[Row], Any]) -> Callable[[Group], list[Row]]:
    return lambda group: [row for row in v.ranked(group) if wanted(row)]


def _parts(group: Group) -> Sequence[p.Part]:
    return [part for row in v.ranked(group) if p.prediction(row) for part in p.parts(row)]


LINES: dict[str, Callable[[Group], Sequence[Any]]] = {
    "What the peak is made of": _rows(m.fullest),
    "What the host holds": _rows(m.hosted_bytes),
    "Precision": _rows(m.types),
    "Predicted and measured": _rows(p.prediction),
    "Predicted and traced, by category": _parts,
    "Rows that alter the same": _rows(v.sibling),
    "DeepSpeed buckets": _rows(zero_block),
    "FSDP2 gathering": _rows(gathering),
    "Same computation?": _rows(lambda row: not drawn.draws(row.group)),
    "Same samples?": _rows(lambda row: drawn.draws(row.group)),
    "What each part does": effects,
}
"""Title -> the subjects of its lines, in order; every row, fastest first, where it is not here."""

"""The rows that a report names: the best by speed and memory, and the fastest within a size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from tests.recount import drawn, noise
from tests.recount import measures as m
from tests.recount import versus as v
from tests.recount.raw import Group, Row


def believable(group: Group) -> list[Row]:
    """Rows that may be named, fastest first."""
    return [row for row in v.ranked(group) if not v.wrong(row)]


def with_need(group: Group) -> list[Row]:
    """Believable rows whose memory is known."""
    return [row for row in believable(group) if m.need_bytes(row) is not None]


def _fastest(group: Group) -> Row | None:
    """The first; None if the noise tells it from no other."""
    rows = believable(group)
    alone = len(rows) == 1 or any(noise.told_apart(row, rows[0]) for row in rows[1:])
    return rows[0] if alone else None


def _same_loss(group: Group) -> Row | None:
    """The fastest row that computes the reference's; None if it may be the fastest of all."""
    words = ("equal", "equal losses", "reference")
    rows = believable(group)
    row = next((row for row in rows if v.parity(row) in words), None)
    return row if row and row is not rows[0] and noise.told_apart(row, rows[0]) else None


def _least(group: Group) -> Row | None:
    rows = with_need(group)
    key = [(m.need_bytes(row), -m.samples_per_second(row)) for row in rows]
    return rows[key.index(min(key))] if len(rows) > 1 else None


def _trade(group: Group) -> Row | None:
    """The row of the front that saves most memory for the speed that it gives up at worst."""
    rows = with_need(group)
    if len(rows) < 2:
        return None
    front = [row for row in rows if v.front(row)]

    def unclear(row: Row) -> bool:
        return not (noise.told_apart(row, rows[0]) or noise.same(row, rows[0]))

    def margin(row: Row) -> float:
        memory = m.need_bytes(row) / m.need_bytes(front[0])
        if row is not front[0] and unclear(row):
            return 1 / noise.interval(row, front[0])[1] - memory
        return m.samples_per_second(row) / m.samples_per_second(front[0]) - memory

    row = max(front, key=margin)
    if margin(row) > 0:
        return row
    return None if any(not noise.told_apart(r, rows[0]) for r in front[1:]) else rows[0]


BEST: dict[str, Callable[[Group], Row | None]] = {
    "Fastest": _fastest,
    "Fastest, same loss": lambda group: None if drawn.draws(group) else _same_loss(group),
    "Fastest, same samples": lambda group: _same_loss(group) if drawn.draws(group) else None,
    "Least memory": _least,
    "Best trade": _trade,
}


def best(group: Group) -> Iterator[tuple[str, Row]]:
    """Each question that a group answers, and its row."""
    found = [] if group.world else [(question, take(group)) for question, take in BEST.items()]
    return ((question, row) for question, row in found if row)


def within(least: float, most: float | None, group: Group) -> list[Any]:
    """The fastest row that needs at most ``least`` bytes, the same for ``most`` (None: no limit),
    and the rows that fit in ``least`` and that the noise does not tell from the first."""

    def able(size: float) -> list[Row]:
        return [row for row in with_need(group) if m.need_bytes(row) <= size]

    small, large = able(least), able(most or math.inf)
    near = [r for r in small[1:] if not noise.told_apart(small[0], r)]
    ends = [rows[0].label if rows else None for rows in (small, large)]
    return [*ends, [row.label for row in near]]

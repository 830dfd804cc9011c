"""A row against its reference and its sibling: ratios, distances, verdict, front and rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from tests.recount import drawn, noise, same
from tests.recount import measures as m
from tests.recount.raw import Group, Row


def distance(kind: str) -> Callable[[Row], float | None]:
    """The farthest of all repetitions."""

    def take(row: Row) -> float | None:
        base = row.group.reference.runs[0]
        found = [same.distances(run, base).get(kind) for run in row.runs]
        return max((far for far in found if far is not None), default=None)

    return take


loss_distance = distance("loss")


def sibling(row: Row) -> Row | None:
    """The plainest other row that alters the same: of its own computation, if there is one."""
    ours = same.design(row.runs[0])
    alike = [other for other in row.group.rows if same.design(other.runs[0]) == ours]
    if not ours or drawn.draws(row.group):
        return None
    kind = same.computation(row)
    for some in ([other for other in alike if same.computation(other) == kind], alike):
        plainest = min(some, key=lambda other: (other.recipe.count("+"), other.recipe))
        if plainest is not row:
            return plainest
    return None


def sibling_name(row: Row) -> str | None:
    """With its computation where that is another."""
    other = sibling(row)
    if other is None:
        return None
    kind = same.computation(other)
    return other.label + (f" ({kind})" if kind and kind != same.computation(row) else "")


def sibling_distance(kind: str) -> Callable[[Row], float | None]:
    def take(row: Row) -> float | None:
        other = sibling(row)
        return other and same.distances(row.runs[0], other.runs[0]).get(kind)

    return take


BAD = ("DIFFERS", "beyond design")


@functools.lru_cache(maxsize=2048)
def judged(row: Row) -> tuple[str, bool]:
    """The word, and whether a report says why; a repetition with a bad word speaks for all."""
    draws = drawn.draws(row.group)
    judge = drawn.verdict if draws else same.verdict
    words = [judge(run, row.group.reference) for run in row.runs]
    word = next((found for found in words if found in BAD), words[0])
    said = word in BAD or (draws and word == "not comparable")
    word = "reference" if row.is_reference else word
    other = sibling(row)
    if other and word not in BAD and same.beside(row, other):
        return "DIFFERS", True
    return word, said


def parity(row: Row) -> str:
    return judged(row)[0]


def wrong(row: Row) -> bool:
    """It computed something else than it promised: in no answer, and not on the front."""
    return parity(row) in BAD


def speed_ratio(row: Row) -> float:
    return m.samples_per_second(row) / m.samples_per_second(row.group.reference)


def of_reference(take: Callable[[Row, Row], Any]) -> Callable[[Row], Any]:
    """Against the reference; nothing for itself."""
    return lambda row: None if row.is_reference else take(row, row.group.reference)


def need_change_fraction(row: Row) -> float | None:
    ours, theirs = m.need_bytes(row), m.need_bytes(row.group.reference)
    return ours / theirs - 1 if ours and theirs else None


def front(row: Row) -> bool:
    """No other row has both less of what rows are ranked by and more samples/s."""
    able = [r for r in row.group.rows if not wrong(r) and m.need_bytes(r) is not None]
    if row not in able or row.group.world:
        return False
    point = (m.need_bytes(row), m.samples_per_second(row))
    others = [(m.need_bytes(r), m.samples_per_second(r)) for r in able]
    return not any(o[0] <= point[0] and o[1] >= point[1] and o != point for o in others)


def ranked(group: Group) -> list[Row]:
    """Fastest first; simulated worlds by what they need."""
    if group.world:
        return sorted(group.rows, key=lambda row: m.need_bytes(row) or math.inf)
    return sorted(group.rows, key=m.samples_per_second, reverse=True)


def place(row: Row) -> int:
    return 1 + ranked(row.group).index(row)


def rank(row: Row) -> int:
    """The best place that the noise leaves: one more than the rows that are faster beyond it."""
    faster = ranked(row.group)[: place(row) - 1]
    return 1 + sum(noise.differ(row, other) is not False for other in faster)


def last_rank(row: Row) -> int:
    """The worst place that the noise leaves: that of the last row that is not slower beyond it."""
    slower = ranked(row.group)[place(row) :]
    return place(row) + sum(noise.differ(row, other) is False for other in slower)

"""The noise floor: how far apart two rows' median steps may lie with nothing different.

docs/explanation/noise-and-fairness.md defines it: Student's t for 95 % times the spread of the
logarithms of runs' medians, and no less than the same of the medians of single steps.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.recount.raw import Group, Row

TABLE = "12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228"
"""Two-sided 95 % of Student's t, 1 to 10 degrees of freedom."""
OF_A_MEDIAN = 1.2533
"""sqrt(pi / 2): the standard error of a median over that of a mean."""


def student(freedom: int) -> float:
    known = [float(t) for t in TABLE.split()]
    return known[freedom - 1] if freedom <= 10 else 1.96 + 2.7 / freedom


@dataclass(frozen=True)
class Spread:
    """A standard deviation of logarithms, and its degrees of freedom."""

    deviation: float
    freedom: int


def spread(lists: Iterable[Sequence[float]]) -> Spread | None:
    """Of the logarithms of values about the mean of their own list, pooled."""
    freedom, squares = 0, 0.0
    for values in lists:
        if len(values) > 1:
            freedom += len(values) - 1
            squares += statistics.variance(map(math.log, values)) * (len(values) - 1)
    return Spread(math.sqrt(squares / freedom), freedom) if freedom else None


def medians(row: Row) -> list[float]:
    return [statistics.median(run.steps) for run in row.runs]


def within(row: Row) -> Spread | None:
    return spread(run.steps for run in row.runs)


@dataclass(frozen=True)
class Floor:
    """The spreads of runs and of steps that a group's rows share."""

    runs: Spread
    steps: Spread | None


@functools.lru_cache(maxsize=2048)
def own(group: Group) -> Floor | None:
    """What a group's own rows tell."""
    runs = spread(medians(row) for row in group.rows)
    return None if runs is None else Floor(runs, usual_steps(group))


@functools.lru_cache(maxsize=2048)
def usual_steps(group: Group) -> Spread | None:
    """The deviation of the row in the middle, with the freedom of all."""
    every = [s for s in map(within, group.rows) if s]
    if not every:
        return None
    return Spread(statistics.median(s.deviation for s in every), sum(s.freedom for s in every))


@functools.lru_cache(maxsize=2048)
def floor_of(group: Group) -> Floor | None:
    """A group's own floor, else that of the first group on the same device, with its own steps."""
    found = own(group)
    if found:
        return found
    for other in group.results.ordered:
        lent = own(other) if (other.device, other.gpu) == (group.device, group.gpu) else None
        if lent:
            return Floor(lent.runs, usual_steps(group) or lent.steps)
    return None


# ---- two rows ----


def error(usual: Spread, sides: Iterable[tuple[Spread | None, int]]) -> float:
    """t times the standard error of a difference; a side that is uneasier counts by its own."""
    squares = 0.0
    for own_spread, count in sides:
        deviation = max(usual.deviation, own_spread.deviation if own_spread else 0.0)
        squares += deviation * deviation / count
    return student(usual.freedom) * math.sqrt(squares)


def one_margin(floor: Floor, rows: Sequence[Row]) -> float:
    between = error(floor.runs, [(spread([medians(r)]), len(r.runs)) for r in rows])
    if floor.steps is None:
        return between
    counts = [(within(r), sum(len(run.steps) for run in r.runs)) for r in rows]
    return max(between, OF_A_MEDIAN * error(floor.steps, counts))


@functools.lru_cache(maxsize=2048)
def margin(row: Row, base: Row) -> float | None:
    """Of logarithms; of rows of two groups the larger; None where one has no floor."""
    floors = [floor_of(r.group) for r in (row, base)]
    return None if None in floors else max(one_margin(f, (row, base)) for f in floors)


def differ(row: Row, base: Row) -> bool | None:
    """Whether one is faster beyond the noise; None: no noise is known."""
    most = margin(row, base)
    if most is None:
        return None
    ends = [statistics.median([s for run in r.runs for s in run.steps]) for r in (row, base)]
    return abs(math.log(ends[0]) - math.log(ends[1])) > most

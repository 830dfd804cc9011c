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

from tests.recount import measures
from tests.recount.raw import Group, Row

__all__ = ["Floor", "differ", "floor_of", "margin", "margin_fraction", "same", "student"]

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
    """Of the steps within runs."""
    return spread(run.steps for run in row.runs)


@dataclass(frozen=True)
class Floor:
    """``runs`` and ``steps``: the spreads that the rows share; ``again``: the rows that ran more
    than once, the reference first; ``lender``: the group that it is borrowed from."""

    runs: Spread
    steps: Spread | None
    again: list[Row]
    lender: Group | None


@functools.lru_cache(maxsize=2048)
def own(group: Group) -> Floor | None:
    """What a group's own rows tell."""
    runs = spread(medians(row) for row in group.rows)
    if runs is None or group.world:
        return None
    again = [row for row in group.rows if len(row.runs) > 1]
    again.sort(key=lambda row: -len(row.runs))
    again.sort(key=lambda row: not row.is_reference)
    return Floor(runs, usual_steps(group), again, None)


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
    if found or group.world:
        return found
    for other in group.of.ordered:
        lent = own(other) if (other.device, other.gpu) == (group.device, group.gpu) else None
        if lent:
            return Floor(lent.runs, usual_steps(group) or lent.steps, lent.again, other)
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


def margin_fraction(row: Row, base: Row) -> float | None:
    most = margin(row, base)
    return None if most is None else math.expm1(most)


def differ(row: Row, base: Row) -> bool | None:
    """Whether one is faster beyond the noise; None: no noise is known."""
    most = margin(row, base)
    if most is None:
        return None
    ends = [statistics.median([s for run in r.runs for s in run.steps]) for r in (row, base)]
    return abs(math.log(ends[0]) - math.log(ends[1])) > most


def interval(row: Row, base: Row) -> tuple[float, float]:
    """Seconds a step of one over the other, as far as the noise lets them be; without a known noise
    by their p10 and p90."""
    both = [[s for run in r.runs for s in run.steps] for r in (row, base)]
    most = margin(row, base)
    if most is None:
        ends = [[measures.tenth(steps, q) for q in (1, 9)] for steps in both]
        return ends[0][0] / ends[1][1], ends[0][1] / ends[1][0]
    middle = statistics.median(both[0]) / statistics.median(both[1])
    return middle / math.exp(most), middle * math.exp(most)


def told_apart(row: Row, base: Row) -> bool:
    """The interval leaves out 1."""
    low, high = interval(row, base)
    return not low <= 1 <= high


def same(row: Row, base: Row) -> bool:
    """The whole interval lies within the floor of both groups, which is at most a quarter."""
    known = [fraction(r.group) for r in (row, base)]
    if None in known or min(known) > 0.25:
        return False
    low, high = interval(row, base)
    return high <= 1 + min(known) and low >= 1 / (1 + min(known))


def fraction(group: Group) -> float | None:
    """For a row as the reference is, but with as few runs as any other row."""
    floor, row = floor_of(group), group.reference
    if floor is None:
        return None
    fewest = min((len(r.runs) for r in group.rows if r is not row), default=1)
    both = [fewest, len(row.runs)]
    between = error(floor.runs, [(None, count) for count in both])
    if floor.steps is None:
        return math.expm1(between)
    every = [run.steps for run in row.runs]
    sides = [(spread(some), sum(map(len, some))) for some in (every[:fewest], every)]
    return math.expm1(max(between, OF_A_MEDIAN * error(floor.steps, sides)))


# ---- as a report has it ----


def of_report(group: Group) -> list:
    """Spreads of runs and of steps with their freedom, medians of the rows that ran again, and the
    floor itself; empty if no noise is known."""
    floor = floor_of(group)
    if floor is None:
        return []
    spreads = [s and [s.deviation, s.freedom] for s in (floor.runs, floor.steps)]
    return [*spreads, [[row.label, medians(row)] for row in floor.again], fraction(group)]


def as_list(data: dict) -> list:
    """The same from a report.json."""
    if "fraction" not in data:
        return []
    spreads = [data[name] and [*data[name].values()] for name in ("runs", "steps")]
    return [*spreads, [[*pair] for pair in data["again"].items()], data["fraction"]]

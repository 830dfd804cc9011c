"""The noise floor: by how much the speeds of two rows may differ though nothing is different.

A run's speed is the median of its steps. Another run of the very same row has another median: its
pages lie elsewhere, the machine is warmer, others work on it too. How far apart such medians lie
is measured by rows that ran more than once, above all by the reference, which a suite measures
first, last and between, so that what drifts over the suite's time is in it.

Of two rows the logarithms of whose medians differ by less than the larger of two margins, nothing
is said to be faster:

- between runs: t * s * sqrt(1/a + 1/b). ``s`` is the standard deviation of the logarithm of a
  run's median about its row's mean, pooled over the rows that ran more than once, and t Student's
  for its degrees of freedom: 95 % of the differences between equal rows of a and b runs lie
  within. That it is wide for few repetitions (with two, t is 12.7; with three, 4.3) is no
  overcaution: a few medians lie close together by luck every so often, and would claim
  differences that are not there.
- within runs: the same of the steps, times 1.2533 for their median, with the deviation of the
  row's own steps or, where that is larger, of a row in the middle. It is the least there must be,
  should the few medians lie together by luck, and it widens the margin of a row with uneasy steps.

Assumed: that noise is relative and as large for all rows of a group as for those that ran more
than once, that it is normal in the logarithm, and that runs are independent. What it cannot see:
other work that was there during one run only and slowed all its steps alike. Of twenty comparisons
of equal rows about one is still said to differ.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.report.figures import derive
from harness.result import Result

Runs = Sequence[Sequence[float]]
"""The timed steps of one row in seconds, run by run."""
Weighted = Sequence[tuple[float, Runs]]
"""Rows, each with the weight of its median's logarithm in a sum."""
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t within which 95 % lie, for 1 to 10 degrees of freedom."""
MEDIAN = 1.2533
"""Standard error of a median over that of a mean: sqrt(pi / 2), for normal values."""


@dataclass(frozen=True)
class Spread:
    """The standard deviation of logarithms (so relative), and its degrees of freedom."""

    deviation: float
    freedom: int


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The noise of a group. ``again``: label -> median step seconds of each run, of the rows that
    ran more than once, the reference first. ``fraction``: up to which share two rows like the
    reference, it with all its runs and the other with one, are not told apart (0.03 is 3 %).
    ``source``: the group that it was measured in, where that is another; empty: its own.
    """

    runs: Spread
    steps: Spread | None
    again: dict[str, tuple[float, ...]]
    fraction: float
    source: str = ""


def floor_of(rows: Mapping[str, Runs], reference: str) -> Floor | None:
    """What the rows of one group tell of their noise, by label; None where none ran twice."""
    runs = _pooled([_logarithms(_medians(row)) for row in rows.values()])
    if runs is None:
        return None
    often = sorted(rows, key=lambda label: (label != reference, -len(rows[label])))
    again = {label: _medians(rows[label]) for label in often if len(rows[label]) > 1}
    made = Floor(runs=runs, steps=_middle(rows.values()), again=again, fraction=0.0)
    return _like(made, rows[reference])


def borrowed(floor: Floor, source: str, rows: Mapping[str, Runs], reference: str) -> Floor:
    """``floor`` for the rows of a group of which none ran twice, with their own steps."""
    steps = _middle(rows.values()) or floor.steps
    made = dataclasses.replace(floor, steps=steps, source=source)
    return _like(made, rows[reference])


def joined(old: Floor | None, new: Floor | None) -> Floor | None:
    """The noise of two result sets together, to compare a row of one with one of the other; that
    of one set where the other knows none."""
    if old is None or new is None:
        return old or new
    steps = [floor.steps for floor in (old, new) if floor.steps]
    return Floor(
        runs=_together([old.runs, new.runs]),
        steps=_together(steps) if steps else None,
        again={},
        fraction=max(old.fraction, new.fraction),
    )


def margin(floor: Floor, ours: Runs, theirs: Runs) -> float:
    """How far apart the logarithms of two rows' medians may lie with nothing different."""
    return swing(floor, [(1.0, ours), (-1.0, theirs)])


def margin_shares(floor: Floor, row: Runs) -> tuple[float, float]:
    """Two squares of a row, by runs and by steps. Of two rows, the larger sum of equal kinds is the
    square of ``margin``."""
    runs, steps = _run_side(floor.runs, row), floor.steps
    by_runs = _margin(floor.runs, [runs]) ** 2
    return by_runs, (MEDIAN * _margin(steps, [_step_side(steps, row)])) ** 2 if steps else 0.0


def swing(floor: Floor, weighted: Weighted) -> float:
    """How far a sum of the logarithms of rows' medians, each times its weight, may lie from what it
    is with nothing different: of a slope through them, say."""
    sides = [_scaled(weight, _run_side(floor.runs, row)) for weight, row in weighted]
    return max(_margin(floor.runs, sides), _margin_of_steps(floor.steps, weighted))


def student(freedom: int) -> float:
    """Student's t within which 95 % lie; above ten degrees of freedom within 0.5 % of it."""
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.7 / freedom


# ---- one group ----


def _like(floor: Floor, reference: Runs) -> Floor:
    """``floor`` with its fraction: for a row as the reference is, but with a single run."""
    sides = [(floor.runs.deviation, count) for count in (1, len(reference))]
    steps = _margin_of_steps(floor.steps, [(1.0, reference[:1]), (-1.0, reference)])
    widest = max(_margin(floor.runs, sides), steps)
    return dataclasses.replace(floor, fraction=math.exp(widest) - 1)


def _middle(rows: Iterable[Runs]) -> Spread | None:
    """The spread of steps within runs, of the row in the middle: one uneasy row is not all."""
    spreads = [spread for row in rows if (spread := _within(row))]
    if not spreads:
        return None
    freedom = sum(spread.freedom for spread in spreads)
    return Spread(statistics.median(spread.deviation for spread in spreads), freedom)


# ---- one row ----

Side = tuple[float, int]
"""One side of a comparison: the deviation of its values, and how many there are."""


def _run_side(usual: Spread, row: Runs) -> Side:
    """A row that ran more than once may be uneasier than the others."""
    return _uneasier(usual, _pooled([_logarithms(_medians(row))])), len(row)


def _step_side(usual: Spread, row: Runs) -> Side:
    return _uneasier(usual, _within(row)), sum(map(len, row))


def _uneasier(usual: Spread, own: Spread | None) -> float:
    return max(usual.deviation, own.deviation if own else 0.0)


def _within(row: Runs) -> Spread | None:
    return _pooled([_logarithms(seconds) for seconds in row])


def _medians(row: Runs) -> tuple[float, ...]:
    return tuple(derive.quantile(seconds, 0.5) for seconds in row)


# ---- arithmetic ----


def _margin_of_steps(usual: Spread | None, weighted: Weighted) -> float:
    """0 where no run has two steps, and nothing is known of their spread."""
    if usual is None:
        return 0.0
    sides = [_scaled(weight, _step_side(usual, row)) for weight, row in weighted]
    return MEDIAN * _margin(usual, sides)


def _scaled(weight: float, side: Side) -> Side:
    deviation, count = side
    return abs(weight) * deviation, count


def _margin(usual: Spread, sides: Sequence[Side]) -> float:
    return student(usual.freedom) * math.sqrt(sum(s**2 / count for s, count in sides))


def _together(spreads: Sequence[Spread]) -> Spread:
    freedom = sum(spread.freedom for spread in spreads)
    squares = sum(spread.deviation**2 * spread.freedom for spread in spreads)
    return Spread(math.sqrt(squares / freedom), freedom)


def _logarithms(values: Iterable[float]) -> list[float]:
    return [math.log(value) for value in values]


def _pooled(lists: Sequence[Sequence[float]]) -> Spread | None:
    """The spread of values about the mean of their own list; None where no list has two."""
    freedom = sum(len(values) - 1 for values in lists if values)
    if not freedom:
        return None
    squares = sum((v - statistics.fmean(values)) ** 2 for values in lists for v in values)
    return Spread(math.sqrt(squares / freedom), freedom)


# ---- disturbed ----
# Which timed steps had not the machine to themselves, by what the kernel counted in them.
#
# Two rules, either of which marks a step. The first needs nothing but the step: other work held a
# tenth of the cores or more while less than a quarter of them was idle, so that it was in the way.
# The second compares the step with the fastest of its row, the one with the least in its way: it
# took a tenth longer, and that time is not work of its own. It had a smaller share of the cores
# (its CPU seconds over its seconds), or forced switches far above. A step that is longer because
# it computes more has more CPU seconds, and is not marked.
#
# The first sees a row that was disturbed from end to end; the second, a step that waited for a
# disk, a GPU or one core of many. What neither can see: other work on a GPU, or on a machine that
# does not tell its load.


OTHERS_LIMIT = 0.1
"""Share of the cores that other work may hold."""
IDLE_LIMIT = 0.25
"""Share of the cores that is idle from which on other work is in nobody's way. Not less: ranks that
wait for a disturbed one leave their own cores idle."""
LONGER = 1.1
"""Times the fastest step, from which on a step is worth a question."""
SHARE_LIMIT = 0.9
"""Of the fastest step's share of the cores."""
FORCED_TIMES, FORCED_MORE = 2, 20
"""Times the fastest step's forced switches, and so many more: a few come with every step."""


class Step(NamedTuple):
    """One timed step of all ranks; ``busy`` and ``cores`` as the slowest rank counted them.
    ``away``: the CPU seconds of ranks on other machines than its."""

    seconds: float
    cpu: float
    forced: int
    busy: float
    cores: int
    away: float = 0.0


def disturbed(result: Result) -> list[bool] | None:
    """Whether the machine was elsewhere in each timed step; None where nothing was counted."""
    steps = _steps(result)
    if not steps:
        return None
    fastest = min(steps, key=lambda step: step.seconds)
    return [others_in_the_way(step) or waited(step, fastest) for step in steps]


def others_in_the_way(step: Step) -> bool:
    """Whether work that is not the run's held cores that the run could have used."""
    had = step.seconds * step.cores
    if not had or not step.busy:
        return False
    others, idle = (step.busy - (step.cpu - step.away)) / had, 1 - step.busy / had
    return others > OTHERS_LIMIT and idle < IDLE_LIMIT


def waited(step: Step, fastest: Step) -> bool:
    """Whether a step is longer than the fastest of its row without having worked more."""
    if step.seconds <= LONGER * fastest.seconds:
        return False
    share, full = step.cpu / step.seconds, fastest.cpu / fastest.seconds
    forced = FORCED_TIMES * fastest.forced + FORCED_MORE
    return share < SHARE_LIMIT * full or step.forced > forced


def cpu_seconds(result: Result) -> list[float]:
    """CPU seconds of each timed step, of all ranks together; empty where not counted."""
    return [step.cpu for step in _steps(result)]


def minor_faults(result: Result) -> list[int]:
    """Pages that each timed step faulted in, of all ranks together; empty where not counted."""
    if not all(rank.step_usage for rank in result.ranks):
        return []
    counted = [rank.step_usage.minor_faults for rank in result.ranks]
    return [sum(step) for step in zip(*counted, strict=False)]


def _steps(result: Result) -> list[Step]:
    if not all(rank.step_usage for rank in result.ranks):
        return []
    counts = [(len(rank.step_seconds), len(rank.step_usage.cpu_seconds)) for rank in result.ranks]
    timed = min((min(pair) for pair in counts), default=0)
    return [_step(result, index) for index in range(timed)]


def _step(result: Result, index: int) -> Step:
    slowest = max(result.ranks, key=lambda rank: rank.step_seconds[index])
    used, local = [rank.step_usage for rank in result.ranks], result.spec.local_processes
    away = [r for r in result.ranks if r.rank // local != slowest.rank // local]
    return Step(
        seconds=slowest.step_seconds[index],
        cpu=sum(use.cpu_seconds[index] for use in used),
        forced=sum(use.forced_switches[index] for use in used),
        busy=slowest.step_usage.busy_seconds[index],
        cores=slowest.step_usage.cores,
        away=sum(rank.step_usage.cpu_seconds[index] for rank in away),
    )

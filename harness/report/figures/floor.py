"""The noise floor: the difference of two rows' speeds that noise alone explains.

A run's speed is the median of its steps. Another run of the same row has another median: its
pages are elsewhere, the machine is warmer, and other processes run. Rows that ran more than
once measure the spread of such medians. A suite measures its reference first, last and between,
so the spread includes drift over the suite's time.

Two rows are not separable if the logarithms of their medians differ by less than the larger of
two margins:

- between runs: t * s * sqrt(1/a + 1/b), for rows of a and b runs. ``s`` is the standard
  deviation of the logarithm of a run's median about its row's mean, pooled over the rows that
  ran more than once. ``t`` is Student's for its degrees of freedom, so 95 % of the differences
  between equal rows lie within the margin. It is wide for few repetitions (t is 12.7 for
  two, 4.3 for three), because a few medians are sometimes close by chance and would show false
  differences.
- within runs: the same of the steps, times 1.2533 for their median. The deviation is that of
  the row's own steps, or of the median row if that is larger. It is a lower bound if the few
  medians are close by chance, and it widens the margin of a row with irregular steps.

Assumptions: noise is relative and equal for all rows of a group, and normal in the logarithm. Runs
are independent. Undetected: other work during one run only that slowed all its steps
equally. About one of twenty comparisons of equal rows still shows a difference.
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
"""Timed steps of one row in seconds, by run."""
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t for 95 %, for 1 to 10 degrees of freedom."""
MEDIAN = 1.2533
"""Standard error of a median over that of a mean: sqrt(pi / 2), for normal values."""


@dataclass(frozen=True)
class Spread:
    """The standard deviation of logarithms (so relative), and its degrees of freedom."""

    deviation: float
    freedom: int


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The noise of a group.

    ``again``: label -> median step seconds of each run, for rows that ran more than once, the
    reference first. ``fraction``: relative difference (0.03 is 3 %) up to which the reference
    with all its runs and an equal row, with as few runs as any, are not separable.
    ``source``: the other group that measured it; empty: its own.
    """

    runs: Spread
    steps: Spread | None
    again: dict[str, tuple[float, ...]]
    fraction: float
    source: str = ""


def floor_of(
    rows: Mapping[str, Runs], reference: str, lent: Floor | None = None, source: str = ""
) -> Floor | None:
    """Return the noise of the rows of one group, by label.

    If none ran twice, it is the floor ``lent`` by the group ``source`` with the spread of this
    group's own steps, or None.
    """
    runs, steps = _pooled([_medians(row) for row in rows.values()]), _middle(rows.values())
    often = sorted(rows, key=lambda label: (label != reference, -len(rows[label])))
    again = {label: _medians(rows[label]) for label in often if len(rows[label]) > 1}
    if runs is None:
        if lent is None:
            return None
        runs, steps, again = lent.runs, steps or lent.steps, lent.again
    made = Floor(runs=runs, steps=steps, again=again, fraction=0.0, source=source)
    # The fraction is for a row like the reference, with as few runs as any other row.
    first = rows[reference]
    fewest = min((len(row) for label, row in rows.items() if label != reference), default=1)
    by_runs = sum(_square(runs, None, count) for count in (fewest, len(first)))
    by_steps = sum(margin_shares(made, row)[1] for row in (first[:fewest], first))
    fraction = math.exp(math.sqrt(max(by_runs, by_steps))) - 1
    return dataclasses.replace(made, fraction=fraction)


def margin(floor: Floor, ours: Runs, theirs: Runs) -> float:
    """Return the difference of two rows' log medians that noise explains."""
    shares = margin_shares(floor, ours), margin_shares(floor, theirs)
    return math.sqrt(max(map(sum, zip(*shares, strict=True))))


def margin_shares(floor: Floor, row: Runs) -> tuple[float, float]:
    """Return two squares of a row, by runs and by steps.

    For two rows, the larger sum of equal kinds is the square of ``margin``.
    """
    by_runs = _square(floor.runs, _pooled([_medians(row)]), len(row))
    if floor.steps is None:
        return by_runs, 0.0
    return by_runs, MEDIAN**2 * _square(floor.steps, _pooled(row), sum(map(len, row)))


def student(freedom: int) -> float:
    """Return Student's t for 95 %; above ten degrees of freedom it is within 0.5 %."""
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.7 / freedom


def _square(usual: Spread, own: Spread | None, count: int) -> float:
    """Return the square of t times the standard error of ``count`` values.

    A row's own spread counts if it is larger than the usual one.
    """
    deviation = max(usual.deviation, own.deviation if own else 0.0)
    return (student(usual.freedom) * deviation) ** 2 / count


def _middle(rows: Iterable[Runs]) -> Spread | None:
    """Return the spread of steps within runs of the median row, so that one irregular row has no
    effect.
    """
    spreads = [spread for row in rows if (spread := _pooled(row))]
    if not spreads:
        return None
    freedom = sum(spread.freedom for spread in spreads)
    return Spread(statistics.median(spread.deviation for spread in spreads), freedom)


def _medians(row: Runs) -> tuple[float, ...]:
    return tuple(derive.quantile(seconds, 0.5) for seconds in row)


def _pooled(lists: Sequence[Sequence[float]]) -> Spread | None:
    """Return the spread of values' logarithms about the mean of their own list; None if no list
    has two.
    """
    freedom = sum(len(values) - 1 for values in lists if values)
    if not freedom:
        return None
    logs = [[math.log(value) for value in values] for values in lists]
    squares = sum((v - statistics.fmean(values)) ** 2 for values in logs for v in values)
    return Spread(math.sqrt(squares / freedom), freedom)


# ---- disturbed steps ----
# Two rules mark a timed step during which the machine was busy, by the kernel's counts. The first
# uses the step alone, so it detects a row that was disturbed throughout. The second compares it
# with the fastest step of its row, so it detects a step that waited for a disk, a GPU or a core. A
# step that computes more has more CPU seconds, and is not marked. Neither detects other work on a
# GPU, or on a machine that does not report its load.


OTHERS_LIMIT = 0.1
"""Share of the cores that other work may hold."""
IDLE_LIMIT = 0.25
"""Share of idle cores from which other work does not disturb.

It cannot be smaller: ranks that wait for a disturbed one leave their own cores idle.
"""
LONGER = 1.1
"""Multiple of the fastest step from which a step is checked."""
SHARE_LIMIT = 0.9
"""Share of the cores, relative to the fastest step's, below which a step waited."""
FORCED_TIMES, FORCED_MORE = 2, 20
"""Allowed forced switches: this multiple of the fastest step's, plus a few that every step has."""


class Step(NamedTuple):
    """One timed step of all ranks; ``busy`` and ``cores`` are the slowest rank's counts.

    ``away``: the CPU seconds of ranks on other machines.
    """

    seconds: float
    cpu: float
    forced: int
    busy: float
    cores: int
    away: float = 0.0


def disturbed(result: Result) -> list[bool] | None:
    """Return for each timed step if it was disturbed; None without counts."""
    steps = _steps(result)
    if not steps:
        return None
    fastest = min(steps, key=lambda step: step.seconds)
    return [others_in_the_way(step) or waited(step, fastest) for step in steps]


def others_in_the_way(step: Step) -> bool:
    """Return True if other work held cores that the run could have used."""
    had = step.seconds * step.cores
    if not had or not step.busy:
        return False
    others, idle = (step.busy - (step.cpu - step.away)) / had, 1 - step.busy / had
    return others > OTHERS_LIMIT and idle < IDLE_LIMIT


def waited(step: Step, fastest: Step) -> bool:
    """Return True if a step is longer than the fastest of its row without more work."""
    if step.seconds <= LONGER * fastest.seconds:
        return False
    share, full = step.cpu / step.seconds, fastest.cpu / fastest.seconds
    forced = FORCED_TIMES * fastest.forced + FORCED_MORE
    return share < SHARE_LIMIT * full or step.forced > forced


def _steps(result: Result) -> list[Step]:
    if not all(rank.step_usage for rank in result.ranks):
        return []
    used, local = [rank.step_usage for rank in result.ranks], result.spec.local_processes
    counts = [(len(rank.step_seconds), len(rank.step_usage.cpu_seconds)) for rank in result.ranks]
    steps = []
    for index in range(min((min(pair) for pair in counts), default=0)):
        seconds = [rank.step_seconds[index] for rank in result.ranks]
        slowest = result.ranks[seconds.index(max(seconds))]
        away = [r for r in result.ranks if r.rank // local != slowest.rank // local]
        step = Step(
            seconds=max(seconds),
            cpu=sum(use.cpu_seconds[index] for use in used),
            forced=sum(use.forced_switches[index] for use in used),
            busy=slowest.step_usage.busy_seconds[index],
            cores=slowest.step_usage.cores,
            away=sum(rank.step_usage.cpu_seconds[index] for rank in away),
        )
        steps.append(step)
    return steps

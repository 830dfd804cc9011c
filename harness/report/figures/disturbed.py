"""Which timed steps had not the machine to themselves, by what the kernel counted in them.

Two rules, either of which marks a step. The first needs nothing but the step: other work held a
tenth of the cores or more while less than a quarter of them was idle, so that it was in the way.
The second compares the step with the fastest of its row, the one with the least in its way: it took
a tenth longer, and that time is not work of its own. It had a smaller share of the cores (its CPU
seconds over its seconds), or forced switches far above. A step that is longer because it computes
more has more CPU seconds, and is not marked.

The first sees a row that was disturbed from end to end; the second, a step that waited for a disk,
a GPU or one core of many. What neither can see: other work on a GPU, or on a machine that does not
tell its load.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.result import Result

__all__ = ["cpu_seconds", "disturbed", "minor_faults"]

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

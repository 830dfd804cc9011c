"""What the kernel counted while a step ran: CPU seconds, switches and page faults of this process,
and how busy the cores were with anybody's work.

Read before the clock starts and after it has stopped. ``harness.report.figures.disturbed`` decides
from them whether the machine was elsewhere.
"""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

from harness.result import StepUsage
from harness.system.cores import busy_now

__all__ = ["Counts", "as_usage", "now"]


class Counts(NamedTuple):
    """Of this process with all its threads (getrusage(2)), and of the cores that it may use."""

    cpu_seconds: float
    voluntary_switches: int
    forced_switches: int
    minor_faults: int
    busy_seconds: float

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(self, other, strict=True)))


def now() -> Counts:
    """The counts since the process began, and since the machine did."""
    used, busy = resource.getrusage(resource.RUSAGE_SELF), busy_now()
    cpu = used.ru_utime + used.ru_stime
    return Counts(cpu, used.ru_nvcsw, used.ru_nivcsw, used.ru_minflt, busy)


def as_usage(steps: list[Counts]) -> StepUsage:
    """The counts of some steps, a list for each."""
    columns = zip(*steps, strict=True) if steps else ([],) * len(Counts._fields)
    named = dict(zip(Counts._fields, map(list, columns), strict=True))
    return StepUsage(cores=len(os.sched_getaffinity(0)), **named)

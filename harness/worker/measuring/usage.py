"""What the kernel counted while a step ran: CPU seconds, switches and page faults of this process,
and how busy the cores were with anybody's work.

Read before the clock starts and after it has stopped. ``harness.report.figures.disturbed`` decides
from them whether the machine was elsewhere.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import NamedTuple

from harness.result import StepUsage

__all__ = ["Counts", "as_usage", "busy_seconds", "now"]

BUSY = (0, 1, 2, 5, 6, 7)
"""Of the columns of /proc/stat: user, nice, system, irq, softirq and steal (what a hypervisor gave
to other machines); not idle and iowait, nor the guests that user counts already. (proc(5))"""


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
    used, busy = resource.getrusage(resource.RUSAGE_SELF), _busy_now()
    cpu = used.ru_utime + used.ru_stime
    return Counts(cpu, used.ru_nvcsw, used.ru_nivcsw, used.ru_minflt, busy)


def as_usage(steps: list[Counts]) -> StepUsage:
    """The counts of some steps, a list for each."""
    columns = zip(*steps, strict=True) if steps else ([],) * len(Counts._fields)
    named = dict(zip(Counts._fields, map(list, columns), strict=True))
    return StepUsage(cores=len(os.sched_getaffinity(0)), **named)


def busy_seconds(stat: str, cores: set[int]) -> float:
    """Core-seconds in which ``cores`` ran anything, by the text of /proc/stat."""
    wanted = {f"cpu{core}" for core in cores}
    rows = [line.split() for line in stat.splitlines() if line.startswith("cpu")]
    ticks = sum(
        int(row[1 + i]) for row in rows if row[0] in wanted for i in BUSY if i + 1 < len(row)
    )
    return ticks / os.sysconf("SC_CLK_TCK")


def _busy_now() -> float:
    """0 where the kernel does not tell."""
    try:
        stat = Path("/proc/stat").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    return busy_seconds(stat, os.sched_getaffinity(0))

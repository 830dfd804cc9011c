"""How busy the cores are that this process may use, with anybody's work, as the kernel counts."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["busy_now", "busy_seconds"]

BUSY = (0, 1, 2, 5, 6, 7)
"""Of the columns of /proc/stat: user, nice, system, irq, softirq and steal (what a hypervisor gave
to other machines); not idle and iowait, nor the guests that user counts already. (proc(5))"""


def busy_seconds(stat: str, cores: set[int]) -> float:
    """Core-seconds in which ``cores`` ran anything, by the text of /proc/stat."""
    wanted = {f"cpu{core}" for core in cores}
    rows = [line.split() for line in stat.splitlines() if line.startswith("cpu")]
    ticks = sum(
        int(row[1 + i]) for row in rows if row[0] in wanted for i in BUSY if i + 1 < len(row)
    )
    return ticks / os.sysconf("SC_CLK_TCK")


def busy_now() -> float:
    """Core-seconds since the machine began; 0 where the kernel does not tell."""
    try:
        stat = Path("/proc/stat").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    return busy_seconds(stat, os.sched_getaffinity(0))

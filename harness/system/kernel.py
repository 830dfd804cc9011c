"""What the kernel says of memory and cores: out-of-memory kills counted, limits of the container.

A process that the kernel kills for memory leaves no message of its own; these counters, read
before and after a run, are the only proof. Linux, control groups of version 2 and 1.
"""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MemoryKills", "cores", "cpu_name", "memory_kills", "shell_limit"]

GROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # version 1 says "no limit" as a number near 2^63


@dataclass(frozen=True)
class MemoryKills:
    """Counters since boot, and the limit in force.

    ``machine`` counts kills on the whole machine, ``group`` those in this control group (the
    container's); ``limit_bytes`` is the group's memory limit, None where there is none.
    """

    machine: int = 0
    group: int = 0
    limit_bytes: int | None = None

    def since(self, before: MemoryKills) -> MemoryKills:
        """The kills that happened after ``before`` was read."""
        return MemoryKills(
            self.machine - before.machine, self.group - before.group, self.limit_bytes
        )


def memory_kills(proc: Path = Path("/proc"), groups: Path = GROUPS) -> MemoryKills:
    """Read the counters; what this machine does not tell counts as 0."""
    group, limit = _group(proc, groups)
    return MemoryKills(_counter(proc / "vmstat", "oom_kill"), group, limit)


def shell_limit() -> tuple[str, int] | None:
    """The shell's command and bytes of a limit on this process's memory; None: there is none."""
    kinds = {"ulimit -v": resource.RLIMIT_AS, "ulimit -d": resource.RLIMIT_DATA}
    found = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    known = ((name, size) for name, size in found.items() if size != resource.RLIM_INFINITY)
    return next(known, None)


def cores(groups: Path = GROUPS) -> int:
    """Cores this process may use: its affinity, and the container's quota where there is one."""
    allowed = len(os.sched_getaffinity(0))
    quota, _, period = _text(groups / "cpu.max").strip().partition(" ")
    if not period:
        quota = _text(groups / "cpu" / "cpu.cfs_quota_us").strip()
        period = _text(groups / "cpu" / "cpu.cfs_period_us").strip()
    if quota.isdigit() and period.isdigit():
        return max(1, min(allowed, int(quota) // int(period)))
    return allowed


def _group(proc: Path, groups: Path) -> tuple[int, int | None]:
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _version1(groups / "memory", path)
    path = next(
        (p.split("::", 1)[1] for p in _text(proc / "self" / "cgroup").splitlines() if "::" in p), ""
    )
    return _version2(groups, path)


def _version1(root: Path, path: str) -> tuple[int, int | None]:
    # Inside a container the path is often the host's, and the group is mounted at the root.
    group = root / path.strip("/")
    group = group if group.is_dir() else root
    kills = _counter(group / "memory.oom_control", "oom_kill")
    return kills, _least(group, root, "memory.limit_in_bytes")


def _version2(root: Path, path: str) -> tuple[int, int | None]:
    group = root / path.strip("/")
    group = group if group.is_dir() else root
    return _counter(group / "memory.events", "oom_kill"), _least(group, root, "memory.max")


def _least(group: Path, root: Path, name: str) -> int | None:
    """The tightest limit of ``group`` and the groups it lies in."""
    limits = []
    for folder in (group, *group.parents):
        word = _text(folder / name).strip()
        if word.isdigit() and int(word) < UNLIMITED:
            limits.append(int(word))
        if folder == root:
            break
    return min(limits, default=None)


def _counter(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.strip().partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def cpu_name() -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or "unknown"

"""GPUs as nvidia-smi sees them: who else is on them, and how full they are. No CUDA context."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MIB = 2**20
BUSY_BYTES = 2**30
"""What other compute processes may hold of a GPU on which one measures."""
DESKTOP_SHARE = 0.25
"""Of a card: more than that, held by nobody who is named, is another container's job."""
GPU_QUERY = "--query-gpu=index,uuid,name,memory.total,memory.used"
DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""One of them is there with a driver: on Linux, and on Linux inside Windows (WSL2)."""
ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
"""The order in which nvidia-smi counts cards. CUDA's own puts the fastest first, so that in a
machine of mixed cards one number would name two of them."""
APP_QUERY = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. ``others`` are processes on it: pid, name and bytes (0 where not told)."""

    index: int
    name: str
    total_bytes: int
    used_bytes: int = 0
    uuid: str = ""
    others: tuple[tuple[int, str, int], ...] = ()

    @property
    def others_bytes(self) -> int:
        """Bytes held by compute processes that nvidia-smi names; where it does not say how much
        one of them holds, all that is in use. None is ours: this is asked before a run."""
        sizes = [size for _, _, size in self.others]
        return self.used_bytes if 0 in sizes else sum(sizes)

    @property
    def unexplained_bytes(self) -> int:
        """Bytes held by nobody who is named: a desktop, the driver, or another container's job."""
        return max(0, self.used_bytes - self.others_bytes)

    @property
    def busy(self) -> bool:
        """Whether another job runs on it. Beside a desktop, which may hold some GiB, one can
        measure; a job would hold more of the card."""
        hidden = self.unexplained_bytes > self.total_bytes * DESKTOP_SHARE
        return hidden or self.others_bytes > BUSY_BYTES

    @property
    def free_bytes(self) -> int:
        """What a run can have of it beside a desktop; all of it where next to nothing is used."""
        return self.total_bytes - (self.used_bytes if self.used_bytes > BUSY_BYTES else 0)

    def who(self) -> str:
        """The processes on it in words."""
        if not self.others:
            return f"{self.used_bytes / 2**30:.1f} GiB by a process that is not visible from here"
        return ", ".join(f"pid {p} ({n}) {b / 2**30:.1f} GiB" for p, n, b in self.others[:3])


def has_driver() -> bool:
    """Whether the system has an NVIDIA driver, whatever nvidia-smi says."""
    return any(map(os.path.exists, DRIVER_FILES))


def order() -> str:
    """How CUDA is to count cards, in every process of ours: as nvidia-smi, if nobody said else."""
    return os.environ.get(ORDER, BY_BUS)


def visible() -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; none without a driver."""
    return tuple(chosen(parse(smi(GPU_QUERY), smi(APP_QUERY)) if has_driver() else []))


def chosen(every: Sequence[Any]) -> list[Any]:
    """Those of ``every`` (with an ``index`` and a ``uuid``) that CUDA_VISIBLE_DEVICES leaves, in
    its order."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        return list(every)
    picked = []
    for word in filter(None, (w.strip() for w in said.split(","))):
        match = [g for g in every if word == str(g.index) or (g.uuid and g.uuid.startswith(word))]
        if not match:  # CUDA itself stops at the first entry that it does not know
            break
        picked.append(match[0])
    return picked


def parse(gpu_lines: str, app_lines: str) -> list[Gpu]:
    """nvidia-smi's two answers (CSV, MiB, no units) as GPUs; lines it cannot read are left out."""
    apps: dict[str, list[tuple[int, str, int]]] = {}
    for uuid, pid, name, used in rows(app_lines, 4):
        apps.setdefault(uuid, []).append((number(pid), name.rpartition("/")[2], number(used) * MIB))
    return [
        Gpu(
            index=number(index),
            name=name,
            total_bytes=number(total) * MIB,
            used_bytes=number(used) * MIB,
            uuid=uuid,
            others=tuple(apps.get(uuid, ())),
        )
        for index, uuid, name, total, used in rows(gpu_lines, 5)
    ]


def rows(text: str, columns: int) -> list[list[str]]:
    """The cells of those lines that have so many ``columns``."""
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [line for line in lines if len(line) == columns]


def number(text: str) -> int:
    """A count, 0 for '[N/A]' and the like."""
    return int(text) if text.isdigit() else 0


def smi(query: str) -> str:
    """nvidia-smi's answer as CSV without heads and units; empty where it has none."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""

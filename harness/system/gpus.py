"""GPUs as nvidia-smi sees them: who else is on them, and how full they are. No CUDA context."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

__all__ = ["Gpu", "has_driver", "parse", "visible"]

MIB = 2**20
GPU_QUERY = "--query-gpu=index,uuid,name,memory.total,memory.used"
DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""One of them is there with a driver: on Linux, and on Linux inside Windows (WSL2)."""
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
        """Bytes held by other processes, whether nvidia-smi names them or not: all that is in use,
        for this is asked before anything of ours runs."""
        return max(self.used_bytes, sum(size for _, _, size in self.others))

    def who(self) -> str:
        """The processes on it in words."""
        if not self.others:
            return f"{self.used_bytes / 2**30:.1f} GiB by a process that is not visible from here"
        return ", ".join(f"pid {p} ({n}) {b / 2**30:.1f} GiB" for p, n, b in self.others[:3])


def has_driver() -> bool:
    """Whether the system has an NVIDIA driver, whatever nvidia-smi says."""
    return any(map(os.path.exists, DRIVER_FILES))


def visible() -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; none without a driver."""
    gpus = parse(_smi(GPU_QUERY), _smi(APP_QUERY)) if has_driver() else []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(gpus)
    picked = []
    for word in filter(None, (w.strip() for w in chosen.split(","))):
        match = [g for g in gpus if word == str(g.index) or (g.uuid and g.uuid.startswith(word))]
        if not match:  # CUDA itself stops at the first entry that it does not know
            break
        picked.append(match[0])
    return tuple(picked)


def parse(gpu_lines: str, app_lines: str) -> list[Gpu]:
    """nvidia-smi's two answers (CSV, MiB, no units) as GPUs; lines it cannot read are left out."""
    apps: dict[str, list[tuple[int, str, int]]] = {}
    for uuid, pid, name, used in _rows(app_lines, 4):
        apps.setdefault(uuid, []).append(
            (_number(pid), name.rpartition("/")[2], _number(used) * MIB)
        )
    return [
        Gpu(
            index=_number(index),
            name=name,
            total_bytes=_number(total) * MIB,
            used_bytes=_number(used) * MIB,
            uuid=uuid,
            others=tuple(apps.get(uuid, ())),
        )
        for index, uuid, name, total, used in _rows(gpu_lines, 5)
    ]


def _rows(text: str, columns: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == columns]


def _number(text: str) -> int:
    """A count, 0 for '[N/A]' and the like."""
    return int(text) if text.isdigit() else 0


def _smi(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""

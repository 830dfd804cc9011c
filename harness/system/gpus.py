"""GPUs as nvidia-smi reports them: memory, processes, clocks. Needs no CUDA context."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.result import GpuSample

MIB, MHZ = 2**20, 10**6
BUSY_BYTES = 2**30
"""Most bytes that other compute processes may hold on a GPU during a measurement."""
DESKTOP_SHARE = 0.25
"""Share of a GPU that a desktop may hold; more belongs to another container's job."""
GPU_QUERY = "--query-gpu=index,uuid,name,memory.total,memory.used"
DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""A driver creates one of these: on Linux, and on Linux inside Windows (WSL2)."""
ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
"""nvidia-smi's order of GPUs. CUDA's own order puts the fastest first, so in a machine with
different GPUs one index would mean two of them."""
APP_QUERY = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
STATE_QUERY = "--query-gpu=index,uuid,clocks.sm,{reasons}"
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The field's name today, and its name in drivers before 535."""
BITS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of the mask that slow a GPU against its user's wish (nvml.h, nvmlClocksEventReasons); idle,
clocks that a user set, and boost synchronized with another GPU are not among them."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. ``others`` are the processes on it: pid, name and bytes (0 if unknown)."""

    index: int
    name: str
    total_bytes: int
    used_bytes: int = 0
    uuid: str = ""
    others: tuple[tuple[int, str, int], ...] = ()

    @property
    def others_bytes(self) -> int:
        """Return the bytes held by named compute processes; all used bytes if one's are unknown.

        No process is of this run, because the query comes before it.
        """
        sizes = [size for _, _, size in self.others]
        return self.used_bytes if 0 in sizes else sum(sizes)

    @property
    def unexplained_bytes(self) -> int:
        """Return the bytes of no named process: of a desktop, the driver, another container."""
        return max(0, self.used_bytes - self.others_bytes)

    @property
    def busy(self) -> bool:
        """Return whether another job runs on it; a desktop, which may hold some GiB, is none."""
        hidden = self.unexplained_bytes > self.total_bytes * DESKTOP_SHARE
        return hidden or self.others_bytes > BUSY_BYTES

    @property
    def free_bytes(self) -> int:
        """Return the bytes available to a run beside a desktop; all if almost none is used."""
        return self.total_bytes - (self.used_bytes if self.used_bytes > BUSY_BYTES else 0)

    def who(self) -> str:
        if not self.others:
            return f"{self.used_bytes / 2**30:.1f} GiB by a process that is not visible from here"
        return ", ".join(f"pid {p} ({n}) {b / 2**30:.1f} GiB" for p, n, b in self.others[:3])


def has_driver() -> bool:
    """Return whether the system has an NVIDIA driver, independent of nvidia-smi."""
    return any(map(os.path.exists, DRIVER_FILES))


def order() -> str:
    """Return CUDA's order of GPUs for every child process: the user's, else nvidia-smi's."""
    return os.environ.get(ORDER, BY_BUS)


def visible() -> tuple[Gpu, ...]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, in its order; none without a driver."""
    return tuple(chosen(parse(smi(GPU_QUERY), smi(APP_QUERY)) if has_driver() else []))


def chosen(every: Sequence[Any]) -> list[Any]:
    """Return those of ``every`` (with an ``index`` and a ``uuid``) in CUDA_VISIBLE_DEVICES."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        return list(every)
    picked = []
    for word in filter(None, (w.strip() for w in said.split(","))):
        match = [g for g in every if word == str(g.index) or (g.uuid and g.uuid.startswith(word))]
        if not match:  # CUDA too stops at the first unknown entry
            break
        picked.append(match[0])
    return picked


def parse(gpu_lines: str, app_lines: str) -> list[Gpu]:
    """Parse nvidia-smi's two answers (CSV, MiB, no units) into GPUs; skip unreadable lines."""
    apps: dict[str, list[tuple[int, str, int]]] = {}
    for uuid, pid, name, used in rows(app_lines, 4):
        one = (number(pid), name.rpartition("/")[2], number(used) * MIB)
        apps.setdefault(uuid, []).append(one)
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


def sample(when: str, count: int) -> list[GpuSample]:
    """Sample clocks and processes of the first ``count`` GPUs of CUDA_VISIBLE_DEVICES.

    Empty if nvidia-smi fails, or if CUDA numbers the GPUs in another order: a sample of another GPU
    is worse than none.
    """
    if not has_driver() or order() != BY_BUS:
        return []
    answers = (smi(STATE_QUERY.format(reasons=name)) for name in REASONS)
    lines = next(filter(None, answers), "")
    return chosen(parse_states(when, lines, smi(APP_QUERY)))[:count]


def parse_states(when: str, gpu_lines: str, app_lines: str) -> list[GpuSample]:
    """Parse nvidia-smi's two answers (CSV, MHz, no units) into samples; skip unreadable lines."""
    users = [uuid for uuid, *_ in rows(app_lines, 4)]
    found = []
    for index, uuid, clock, mask in rows(gpu_lines, 4):
        bits = int(mask, 16) if mask.startswith("0x") else 0  # else '[N/A]'
        found.append(
            GpuSample(
                when=when,
                index=number(index),
                uuid=uuid,
                sm_clock_hz=number(clock) * MHZ,
                held_back_by=[name for bit, name in BITS.items() if bits & bit],
                processes=users.count(uuid),
            )
        )
    return found


def rows(text: str, columns: int) -> list[list[str]]:
    """Return the cells of the lines with exactly ``columns`` columns."""
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [line for line in lines if len(line) == columns]


def number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def smi(query: str) -> str:
    """Return nvidia-smi's answer as CSV without header and units; empty if it fails."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""

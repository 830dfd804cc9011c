"""One call of ``calibrate``: its folder, options and earlier outcomes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.planner.calibrate.parts import (
    DONE,
    Budget,
    Outcome,
    Setting,
    Station,
    kept,
    mark_of,
    stations_of,
)
from harness.planner.calibration import store
from harness.planner.calibration.record import Device
from harness.resolve import Resolved, resolve
from harness.result import Result
from harness.spec import Spec
from harness.suite.run import Planned, plan
from harness.system.machine import Machine

PROCESS_BYTES = 3 * 2**30
"""Host memory of one process of a small model, with its libraries."""
GPU_BYTES = 6 * 2**30
"""GPU memory of the same process, with its context; a run has a process on each GPU."""
MOST = 8


def default_jobs(machine: Machine, gpu_bytes: int) -> int:
    """Return the number of runs at a time, by cores, host memory and GPU memory.

    A run has two processes. ``gpu_bytes`` is 0 if runs use the CPU.
    """
    limits = [MOST, max(2, machine.cores // 2), machine.memory_bytes // (2 * PROCESS_BYTES)]
    if gpu_bytes:
        limits.append(gpu_bytes // GPU_BYTES)
    return max(1, min(limits))


@dataclass
class Session:
    """One call's folder, options and state.

    ``tell`` prints a line that stays. ``live`` shows a line while work goes on: its name, and the
    seconds that it usually takes. ``jobs``: runs of the check at a time (0: as many as fit).
    ``known``: earlier results of this device, which also calibrate predictions.
    """

    folder: Path
    machine: Machine
    setting: Setting
    budget: Budget
    tell: Callable[[str], None]
    live: Callable[[str, float], AbstractContextManager[Any]]
    fresh: bool = False
    jobs: int = 0
    known: Sequence[Result] = ()
    overrides: Mapping[str, object] = field(default_factory=dict)
    resolved: dict[Spec, Resolved] = field(default_factory=dict)

    @property
    def jobs_at_a_time(self) -> int:
        """The runs of the check at a time."""
        on_gpu = self.setting.device == "cuda"
        return self.jobs or default_jobs(self.machine, on_gpu * self.setting.gpu_bytes)

    @functools.cached_property
    def device(self) -> Device:
        """The device to calibrate."""
        return store.device(self.setting.device, self.machine)

    def stations(self, part: str) -> list[Station]:
        """Return the stations of a part on this machine."""
        return stations_of(part, self.setting)

    def mark(self, station: Station) -> str:
        """Return the hash that decides if a station's earlier outcome is valid."""
        return mark_of(station, self.device, self.setting.small)

    def earlier(self, station: Station) -> Outcome | None:
        """Return the outcome of an earlier call that needs no repetition, or None."""
        found = None if self.fresh else kept(station.part, station.name, self.folder)
        good = found is not None and found.status in DONE and found.mark == self.mark(station)
        return found if good else None

    def planned(self, station: Station, folder: Path) -> Planned:
        """Return the run of a row or a check, with all checks that need no process."""
        assert station.spec is not None
        return plan([self.resolved_of(station.spec)], folder, self.machine)[0]

    def resolved_of(self, spec: Spec) -> Resolved:
        """Return ``spec`` resolved, and cache it."""
        if spec not in self.resolved:
            self.resolved[spec] = resolve(spec)
        return self.resolved[spec]


def clock(minutes: float | None) -> Budget:
    """Return a budget that starts now."""
    return Budget(minutes=minutes, now=time.monotonic, began=time.monotonic())

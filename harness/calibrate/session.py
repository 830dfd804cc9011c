"""One call of ``calibrate``: its folder, what it was asked for, and what earlier calls left."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.calibrate.outcome import DONE, Outcome, kept, mark_of
from harness.calibrate.parts import Setting, stations_of
from harness.calibrate.station import Budget, Station
from harness.calibrate.together import default_jobs
from harness.calibration import here
from harness.calibration.record import Device
from harness.resolve import Resolved, resolve
from harness.result import Result
from harness.spec import Spec
from harness.suite.run import Planned, plan
from harness.system.machine import Machine

__all__ = ["Session", "clock"]


@dataclass
class Session:
    """``tell`` prints a line. ``jobs``: runs of the check at a time (0: as many as fit). ``known``:
    results of this device, measured earlier, by which predictions are calibrated too."""

    folder: Path
    machine: Machine
    setting: Setting
    budget: Budget
    tell: Callable[[str], None]
    fresh: bool = False
    jobs: int = 0
    known: Sequence[Result] = ()
    overrides: Mapping[str, object] = field(default_factory=dict)
    resolved: dict[Spec, Resolved] = field(default_factory=dict)

    @property
    def jobs_at_a_time(self) -> int:
        """Runs of the check at a time."""
        on_gpu = self.setting.device == "cuda"
        return self.jobs or default_jobs(self.machine, on_gpu * self.setting.gpu_bytes)

    @functools.cached_property
    def device(self) -> Device:
        """What is calibrated."""
        return here.device(self.setting.device, self.machine)

    def stations(self, part: str) -> list[Station]:
        """The stations of a part here."""
        return stations_of(part, self.setting)

    def mark(self, station: Station) -> str:
        """What decides that a station's earlier outcome holds."""
        return mark_of(station, self.device, self.setting.small)

    def earlier(self, station: Station) -> Outcome | None:
        """The outcome of an earlier call that need not be repeated."""
        found = None if self.fresh else kept(station.part, station.name, self.folder)
        good = found is not None and found.status in DONE and found.mark == self.mark(station)
        return found if good else None

    def planned(self, station: Station, folder: Path) -> Planned:
        """A row's or a check's run, checked as far as that takes no process."""
        assert station.spec is not None
        return plan([self.resolved_of(station.spec)], folder, self.machine)[0]

    def resolved_of(self, spec: Spec) -> Resolved:
        """``spec`` with what follows from it, once."""
        if spec not in self.resolved:
            self.resolved[spec] = resolve(spec)
        return self.resolved[spec]


def clock(minutes: float | None) -> Budget:
    """A budget that begins now."""
    return Budget(minutes=minutes, now=time.monotonic, began=time.monotonic())

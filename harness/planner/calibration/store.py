"""Folders of calibrations, the choice of one for a card, and the description of this machine.
They are in ``results/calibrations``. Does not import torch."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness import KEPT
from harness.planner.calibration.record import Calibration, Device, Fitted, fitted, load
from harness.system import gpus
from harness.system import machine as kernel
from harness.system.machine import Machine
from harness.system.probe import version
from strategies.base import BadInput

OWN = KEPT / "calibrations"
BUSY = 0.1
"""Share of the cores above which other work is reported."""


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A calibration in use. ``marks`` are its differences from this machine, in words."""

    calibration: Calibration
    marks: tuple[str, ...] = ()

    @functools.cached_property  # a search reads it for every bound, and a fit takes milliseconds
    def fitted(self) -> Fitted:
        """Factors and uncertainty of predicted times, fitted to the calibration's rows."""
        return fitted(self.calibration.rows)

    @property
    def words(self) -> str:
        """Sentence with the device, versions, day and fit of the calibration."""
        device = self.calibration.device
        driver = f", driver {device.driver}" if device.driver else ""
        source = f", measured by {self.calibration.source}" if self.calibration.source else ""
        where = f"{device.name}{driver}, torch {device.torch}, {self.calibration.measured}{source}"
        marked = f" ({'; '.join(self.marks)})" if self.marks else ""
        times = "Too few measured rows for its own uncertainty of time: the typical one is shown."
        if fit := self.fitted.rows:
            share = 100 * max(self.fitted.shares.values())
            times = f"Times fitted to {fit} measured rows, each within {share:.0f} %."
        return f"Calibrated: {where}{marked}. {times}"


def applied(
    calibration: Calibration, *, driver: str = "", torch: str = "", cores: int = 0
) -> Applied:
    """Return ``calibration`` with marks for differences and for other work during a CPU's
    calibration.
    The driver, torch and cores are compared if given."""
    device, marks = calibration.device, []
    if device.kind == "cpu" and calibration.load > BUSY * device.cores:
        marks.append(f"measured beside other work on {calibration.load:.1f} cores")
    if driver and device.driver and driver != device.driver:
        marks.append(f"here driver {driver}")
    if torch and _release(torch) != _release(device.torch):
        marks.append(f"here torch {torch}")
    if cores and device.kind == "cpu" and cores != device.cores:
        marks.append(f"here {cores} cores")
    return Applied(calibration=calibration, marks=tuple(marks))


def choose(
    calibrations: Iterable[Calibration], *, driver: str = "", torch: str = ""
) -> Applied | None:
    """Return the calibration with the fewest marks, then the newest, then the first; or None."""
    known = [applied(one, driver=driver, torch=torch) for one in calibrations]
    known.sort(key=lambda one: one.calibration.measured, reverse=True)
    return min(known, key=lambda one: len(one.marks), default=None)


def every(folder: Path | None = None) -> list[Calibration]:
    """Return all readable calibrations of ``folder``, by default of ``OWN``."""
    found = []
    for path in sorted((folder or OWN).glob("*.json")):
        try:
            found.append(load(path))
        except BadInput as error:
            _leave_out(str(error))
    return found


@functools.cache
def _leave_out(why: str) -> None:
    print(f"left out: {why}", file=sys.stderr)


def file_of(calibration: Calibration, folder: Path) -> Path:
    """Return the file of a calibration in ``folder``; there is one per device, driver and torch."""
    device = calibration.device
    words = "-".join(filter(None, (device.name, device.driver, _release(device.torch))))
    return folder / f"{re.sub(r'[^a-z0-9.]+', '-', words.lower()).strip('-')}.json"


def _release(version: str) -> str:
    """Return 2.13.0 for 2.13.0+cu130; the driver and the device imply the build."""
    return version.partition("+")[0]


def device(kind: str, machine: Machine | None = None) -> Device:
    """Return this machine's first GPU (``kind`` cuda with a machine), or its CPU."""
    shared: dict[str, Any] = {"cores": kernel.cores(), "torch": torch()}
    if kind != "cuda" or machine is None:
        return Device(name=processor(), kind="cpu", memory_bytes=memory_bytes(), **shared)
    first = machine.gpus[0]
    seen = next(iter((machine.probe or {}).get("gpus", [])), {})
    return Device(
        name=first.name,
        kind="cuda",
        memory_bytes=first.total_bytes,
        driver=driver(),
        capability=list(seen.get("capability", [])),
        **shared,
    )


def processor() -> str:
    """Return the CPU's name with its number of cores, because another number is another device."""
    cores = kernel.cores()
    return f"{kernel.cpu_name()}, {cores} core{'s' * (cores != 1)}"


def memory_bytes() -> int:
    """Return the bytes that all processes together may use."""
    total = psutil.virtual_memory().total
    return min(total, kernel.memory_kills().limit_bytes or total)


def driver() -> str:
    """Return the version of the NVIDIA driver; empty without one."""
    said = gpus.smi("--query-gpu=driver_version") if gpus.has_driver() else ""
    return next(iter(said.split()), "")


def torch() -> str:
    """Return the version of the installed torch; empty without one."""
    return version("torch") or ""

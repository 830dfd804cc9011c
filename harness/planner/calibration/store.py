"""Where calibrations lie, and which one is for a card. No torch.

A reader's own are in ``results/calibrations``, those that the project measured beside this module.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness import ROOT
from harness.planner.calibration.record import Calibration, Device, Fitted, fitted, load
from harness.result import reported_name
from harness.system import gpus
from harness.system import machine as kernel
from harness.system.gpus import Gpu
from harness.system.machine import Machine
from harness.system.probe import version
from strategies.base import BadInput

OWN = ROOT / "results" / "calibrations"
BUSY = 0.1
"""Share of the cores from which other work is said to have been there."""
PROJECT = Path(__file__).with_name("measured")


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A calibration that predictions use, with ``marks``: in what it is not of this machine as it
    is now."""

    calibration: Calibration
    marks: tuple[str, ...] = ()

    @property
    def fitted(self) -> Fitted:
        """What its rows tell of predicted times."""
        return fitted(self.calibration.rows)

    @property
    def words(self) -> str:
        """Of what and when, in a sentence."""
        device, found = self.calibration.device, self.fitted
        driver = f", driver {device.driver}" if device.driver else ""
        source = f", measured by {self.calibration.source}" if self.calibration.source else ""
        of = f"{device.name}{driver}, torch {device.torch}, {self.calibration.measured}{source}"
        marked = f" ({'; '.join(self.marks)})" if self.marks else ""
        return f"Calibrated: {of}{marked}. {_times(found)}"


def _times(found: Fitted) -> str:
    if not found.rows:
        return "Too few measured rows for its own uncertainty of time: the typical one is shown."
    share = 100 * max(found.shares.values())
    return f"Times fitted to {found.rows} measured rows, nine of ten within {share:.0f} %."


def applied(
    calibration: Calibration, *, driver: str = "", torch: str = "", cores: int = 0
) -> Applied:
    """``calibration`` marked with what is another here (driver, torch, or cores, where known), and
    with other work that a CPU had."""
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
    """The best of several of one card: of this driver and torch where there is one, then the
    newest; the first of equals."""
    known = [applied(one, driver=driver, torch=torch) for one in calibrations]
    known.sort(key=lambda one: one.calibration.measured, reverse=True)
    return min(known, key=lambda one: len(one.marks), default=None)


def every(*folders: Path) -> list[Calibration]:
    """Return all that can be read, a reader's own first; a file that is none is named once."""
    found = []
    for folder in folders or (OWN, PROJECT):
        for path in sorted(folder.glob("*.json")):
            try:
                found.append(load(path))
            except BadInput as error:
                _leave_out(str(error))
    return found


@functools.cache
def _leave_out(why: str) -> None:
    print(f"left out: {why}", file=sys.stderr)


def file_of(calibration: Calibration, folder: Path) -> Path:
    """The file that it is kept in: one for a device, driver and torch."""
    device = calibration.device
    words = "-".join(filter(None, (device.name, device.driver, _release(device.torch))))
    return folder / f"{re.sub(r'[^a-z0-9.]+', '-', words.lower()).strip('-')}.json"


def _release(version: str) -> str:
    """2.13.0 of 2.13.0+cu130: the build follows from the driver and the device."""
    return version.partition("+")[0]


# ---- here ----
# What a calibration made here now would be of: this machine's device, driver and torch.


DRIVER = "--query-gpu=driver_version"


def device(kind: str, machine: Machine | None = None) -> Device:
    """This machine's first GPU (``kind`` cuda), or its CPU."""
    return _gpu(machine) if kind == "cuda" and machine else _cpu()


def _cpu() -> Device:
    return Device(
        name=processor(),
        kind="cpu",
        memory_bytes=memory_bytes(),
        cores=kernel.cores(),
        torch=torch(),
    )


def _gpu(machine: Machine) -> Device:
    first: Gpu = machine.gpus[0]
    seen = next(iter((machine.probe or {}).get("gpus", [])), {})
    return Device(
        name=reported_name(first.name),
        kind="cuda",
        memory_bytes=first.total_bytes,
        cores=kernel.cores(),
        torch=torch(),
        driver=driver(),
        capability=list(seen.get("capability", [])),
    )


def processor() -> str:
    """The CPU's name with its cores: with another number of them it is another device."""
    cores = kernel.cores()
    return f"{kernel.cpu_name()}, {cores} core{'s' * (cores != 1)}"


def memory_bytes() -> int:
    """What all processes together may hold."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(whole, kernel.memory_kills().limit_bytes or whole)


def driver() -> str:
    """The NVIDIA driver's version; empty without one."""
    said = gpus.smi(DRIVER) if gpus.has_driver() else ""
    return next(iter(said.split()), "")


def torch() -> str:
    """The version of the installed torch; empty without one."""
    return version("torch") or ""

"""What a calibration made here now would be of: this machine's device, driver and torch."""

from __future__ import annotations

import os

from harness.calibration.record import Device
from harness.result import reported_name
from harness.system import gpus, kernel
from harness.system.gpus import Gpu
from harness.system.machine import Machine
from harness.system.probe import version

__all__ = ["device", "driver", "memory_bytes", "processor", "torch"]

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

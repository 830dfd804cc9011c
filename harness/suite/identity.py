"""What decides a measurement, as hashes: equal identity, no need to measure again. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.data.feed import stamp
from harness.launch.sources import MEASURED, digest
from harness.resolve import Resolved
from harness.spec import Spec
from harness.subjects import from_file
from harness.system import kernel
from harness.system.machine import Machine

__all__ = ["identity"]

DECISIVE = ("PYTORCH_", "TORCH_CUDNN", "NVIDIA_TF32", "CUDA_LAUNCH", "NCCL_", "MKL_", "ONEDNN_")
"""Variables of the caller's that change what is measured."""
DRIVER = Path("/proc/driver/nvidia/version")


def identity(resolved: Resolved, machine: Machine) -> str:
    """A hash of all that decides a measurement: spec, data, subject, code, versions, devices."""
    spec = resolved.spec
    rooms = (*MEASURED, "cluster") if spec.nodes > 1 else MEASURED
    facts = [spec.key, stamp(spec.data), digest(rooms), platform.python_version()]
    facts += [machine.versions, from_file.identity(spec.model)]
    facts.append(resolved.subject.identity)
    facts += _file(spec.weights)
    facts += [
        told for part in resolved.recipe.strategies for n in part.reads() for told in _file(n)
    ]
    facts.append(sorted((k, v) for k, v in os.environ.items() if k.startswith(DECISIVE)))
    return hashlib.sha256(json.dumps([*facts, _devices(spec, machine)]).encode()).hexdigest()[:16]


def _file(name: str) -> list[Any]:
    """What tells another file of this name from it; nothing without a name."""
    path = ROOT / name
    if not name or not path.exists():
        return []
    told = path.stat()
    return [told.st_size, told.st_mtime_ns]


def _devices(spec: Spec, machine: Machine) -> list[Any]:
    cpu = [platform.machine(), kernel.cpu_name(), machine.cores]
    if spec.nodes > 1:  # which devices there are, whatever their hosts are called
        cpu.append(sorted(machine.others))
    if spec.device != "cuda":
        return cpu
    driver = DRIVER.read_text(encoding="utf-8").splitlines()[:1] if DRIVER.exists() else []
    return [*cpu, *machine.device_names, *driver]

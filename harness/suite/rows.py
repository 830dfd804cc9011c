"""Rows of a suite: repetitions of the reference, and identities of measurements."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, opened
from harness.launch.sources import MEASURED, digest
from harness.resolve import Resolved
from harness.spec import Spec, check_sizes
from harness.subjects import own_module
from harness.suite.file import SuiteError
from harness.system import machine as kernel
from harness.system.machine import Machine
from harness.system.probe import version

# ---- repeats of the reference ----


def with_reference_again(specs: Sequence[Spec], reference: str, times: int) -> list[Spec]:
    """Return ``specs`` with repetitions of the reference row, so that it is measured ``times``
    times.

    They are spread evenly over the suite, and the last one is at its end, so that the machine's
    drift shows between them. Only ``repeat`` distinguishes each run from the first.

    If several rows have that recipe, the row that is comparable with most others is repeated.
    Nothing is added for a row without a comparable row, or for recorded runs, which are not ranked.

    Args:
        reference: the recipe of the suite's reference row.
        times: 1 adds nothing; ``--repeat`` counts.

    Raises:
        SuiteError: ``times`` is below 1.
    """
    if times < 1:
        raise SuiteError(f"noise_floor is {times}; give --noise-floor at least 1 (1: no floor)")
    check_sizes({"noise_floor": times}, "--")
    # Rows with the same work are ranked together: they differ in these fields alone.
    work = [dataclasses.replace(s, recipe="", processes=1, nodes=1, repeat=0) for s in specs]
    first = [dataclasses.replace(spec, repeat=0) for spec in specs]
    ranked = Counter(dict(zip(first, work, strict=True)).values())
    named = [i for i, s in enumerate(specs) if s.recipe == reference and s.repeat == 0]
    place = max(named, key=lambda i: ranked[work[i]], default=None)
    if place is None or specs[place].recorded or ranked[work[place]] < 2:
        return list(specs)
    there = first.count(specs[place])
    # Insert the missing ones after its first run, at equal distances.
    others, end = list(specs[place + 1 :]), list(specs[: place + 1])
    for index in range(there, times):
        taken = round(len(others) / (times - index))
        end += [*others[:taken], dataclasses.replace(specs[place], repeat=index)]
        others = others[taken:]
    return end + others


# ---- identity: a result with the same one need not be measured again ----

DECISIVE = ("PYTORCH_", "TORCH_CUDNN", "NVIDIA_TF32", "CUDA_LAUNCH", "NCCL_", "MKL_", "ONEDNN_")
"""Prefixes of the caller's variables that affect a measurement."""
DRIVER = Path("/proc/driver/nvidia/version")


def identity(resolved: Resolved, machine: Machine) -> str:
    """Return a hash of everything that affects a measurement."""
    from harness.data.feed import stamp

    spec = resolved.spec
    facts: list[Any] = [spec.key, stamp(spec.data), digest(MEASURED), platform.python_version()]
    facts += [machine.versions, own_module.identity(resolved.own_model)]
    facts += [resolved.subject.identity, version("diffusers")]
    facts += _file(spec.weights)
    facts += [
        fact for part in resolved.recipe.strategies for n in part.reads() for fact in _file(n)
    ]
    facts.append(sorted((k, v) for k, v in os.environ.items() if k.startswith(DECISIVE)))
    devices = [platform.machine(), kernel.cpu_name(), machine.cores]
    if spec.device == "cuda":
        driver = DRIVER.read_text(encoding="utf-8").splitlines()[:1] if DRIVER.exists() else []
        devices += [*(gpu.name for gpu in machine.gpus), *driver]
    return hashlib.sha256(json.dumps([*facts, devices]).encode()).hexdigest()[:16]


def _file(name: str) -> list[Any]:
    """Return the digest of the file; empty if it does not exist."""
    path = ROOT / name
    return [opened.digest(path)] if name and path.exists() else []

"""Rows of a suite: repetitions of the reference, and identities of measurements."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
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
    Nothing is added for a row without a comparable row, or for
    recorded runs, which are not ranked.

    Args:
        reference: the recipe of the suite's reference row.
        times: 1 adds nothing; ``--repeat`` counts.

    Raises:
        SuiteError: ``times`` is below 1.
    """
    if times < 1:
        raise SuiteError(f"noise_floor is {times}; give --noise-floor at least 1 (1: no floor)")
    check_sizes({"noise_floor": times}, "--")
    row = _reference(specs, reference)
    if row is None or row.recorded or len(_compared(row, specs)) < 2:
        return list(specs)
    there = sum(dataclasses.replace(spec, repeat=0) == row for spec in specs)
    return _spread(list(specs), row, there, times - there)


def _spread(specs: list[Spec], row: Spec, there: int, more: int) -> list[Spec]:
    """Insert ``row`` ``more`` times after its first run, at equal distances."""
    first = specs.index(row) + 1
    others, end = specs[first:], specs[:first]
    for index in range(more):
        taken = round(len(others) / (more - index))
        end += [*others[:taken], dataclasses.replace(row, repeat=there + index)]
        others = others[taken:]
    return end + others


def _reference(specs: Sequence[Spec], recipe: str) -> Spec | None:
    named = [spec for spec in specs if spec.recipe == recipe and spec.repeat == 0]
    return max(named, key=lambda spec: len(_compared(spec, specs)), default=None)


def _compared(row: Spec, specs: Sequence[Spec]) -> set[Spec]:
    """Return the rows with the same work, itself among them; they are ranked together."""
    work = _work(row)
    return {dataclasses.replace(spec, repeat=0) for spec in specs if _work(spec) == work}


def _work(spec: Spec) -> Spec:
    """Return a spec without the fields in which rows of one ranking may differ."""
    return dataclasses.replace(spec, recipe="", processes=1, nodes=1, repeat=0)


# ---- identity ----
# A result with the same identity need not be measured again.


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
        told for part in resolved.recipe.strategies for n in part.reads() for told in _file(n)
    ]
    facts.append(sorted((k, v) for k, v in os.environ.items() if k.startswith(DECISIVE)))
    return hashlib.sha256(json.dumps([*facts, _devices(spec, machine)]).encode()).hexdigest()[:16]


def _file(name: str) -> list[Any]:
    """Return the digest of the file; empty if it does not exist."""
    path = ROOT / name
    return [opened.digest(path)] if name and path.exists() else []


def _devices(spec: Spec, machine: Machine) -> list[Any]:
    cpu = [platform.machine(), kernel.cpu_name(), machine.cores]
    if spec.device != "cuda":
        return cpu
    driver = DRIVER.read_text(encoding="utf-8").splitlines()[:1] if DRIVER.exists() else []
    return [*cpu, *machine.device_names, *driver]

"""What decides a measurement, as hashes: equal identity, no need to measure again. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

from harness import kernel
from harness.machine import Machine
from harness.resolve import project_root
from harness.spec import Spec

__all__ = ["code", "identity"]

WATCHERS = {
    *("predict", "plan.py", "plan_text.py", "search.py", "search_text.py"),
    *("__main__.py", "cli.py", "commands.py", "training.py", "listing.py", "progress.py"),
    *("portraying.py", "portrait.py", "lint.py", "linting.py", "one_row.py", "options.py"),
    *("doctor.py", "machine.py", "gpus.py", "probe.py", "matrix.py", "suite_file.py", "report"),
    *("suite_run.py", "capability.py"),
}
"""Parts of ``harness`` that plan, show and tell: a change there changes no measurement."""
DECISIVE = ("PYTORCH_", "TORCH_CUDNN", "NVIDIA_TF32", "CUDA_LAUNCH", "NCCL_", "MKL_", "ONEDNN_")
"""Variables of the caller's that change what is measured."""
DRIVER = Path("/proc/driver/nvidia/version")


def identity(spec: Spec, machine: Machine) -> str:
    """A hash of all that decides a measurement: spec, data, code, versions and devices."""
    facts = [spec.key, _data(spec.data), code(), platform.python_version(), machine.versions]
    facts.append(sorted((k, v) for k, v in os.environ.items() if k.startswith(DECISIVE)))
    return hashlib.sha256(json.dumps([*facts, _devices(spec, machine)]).encode()).hexdigest()[:16]


def _devices(spec: Spec, machine: Machine) -> list[Any]:
    cpu = [platform.machine(), kernel.cpu_name(), machine.cores]
    if spec.device != "cuda":
        return cpu
    driver = DRIVER.read_text(encoding="utf-8").splitlines()[:1] if DRIVER.exists() else []
    return [*cpu, *machine.device_names, *driver]


def _data(data: str) -> list[Any]:
    """A folder of latents by when its folders last changed: adding, removing or renaming a file
    does, and reading a million files would take longer than the run."""
    kind, _, path = data.partition(":")
    if kind != "latents":
        return []
    folders = sorted(p for p in (Path(path), *Path(path).glob("*")) if p.is_dir())
    return [(p.name, p.stat().st_mtime_ns) for p in folders]


def code() -> str:
    """A hash of the sources that a run executes, as they are now: they may change between rows."""
    root, digest = project_root(), hashlib.sha256()
    files = [*(root / "harness").rglob("*.py"), *(root / "strategies").rglob("*.py")]
    files += [p for p in (root / "launch_configs").iterdir() if p.suffix in (".yaml", ".json")]
    for path in sorted(files):
        name = path.relative_to(root)
        if name.parts[0] == "harness" and name.parts[1] in WATCHERS:
            continue
        digest.update(str(name).encode() + path.read_bytes())
    return digest.hexdigest()[:16]

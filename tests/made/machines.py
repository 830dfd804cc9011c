"""A machine, a suite for it, and a launcher, made up."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from harness.result import Result, Status
from harness.spec import Spec
from harness.system.machine import Machine

SUITE = """
name: mine
reference: ddp
timeout_seconds: 60
cpu: {model: DiT-T/4, data: synthetic, global_batch: 8, steps: 3, processes: 2}
gpu: {model: DiT-T/4, data: synthetic, per_process_batch: 4, steps: 3, processes: all}
recipes: [zero2, ddp, single, {recipe: zero3, steps: 5}]
gpu_recipes: ["ddp+tf32"]
"""


def machine(folder: Path, **changes: object) -> Machine:
    """A machine on which everything of the CPU runs; torch sees the GPUs that it is given."""
    gpus = changes.get("gpus", ())
    op = {"ok": True, "reason": "", "file": None, "built": True, "seconds": 0.0}
    probe = {
        "errors": {},
        "ops": {"cpu_adam": op, "async_io": op},
        "gpus": [
            {"name": gpu.name, "total_bytes": gpu.total_bytes, "capability": [9, 0]} for gpu in gpus
        ],
        "backends": ["gloo"],
    }
    facts = {
        "cores": 2,
        "memory_bytes": 8 << 30,
        "container_bytes": None,
        "gpus": (),
        "disk_free_bytes": 1 << 40,
        "folder": folder,
        "compiler": "/usr/bin/g++",
        "ninja": "/usr/bin/ninja",
        "probe": probe,
    }
    return Machine(**{**facts, **changes})


def named(rows: Iterable[Spec]) -> str:
    """Recipes, with their repetitions."""
    return " ".join(f"{spec.recipe}{spec.repeat or ''}" for spec in rows)


class FakeLaunch:
    """Writes a result as ``launch.run`` does; ``ends`` maps a row's name to how it ends."""

    def __init__(self, **ends: Status | BaseException) -> None:
        self.ends, self.started = ends, []

    def __call__(self, resolved, folder, *, timeout, on_status) -> Result:
        name = named([resolved.spec])
        self.started.append(name)
        on_status({"phase": "measure", "step": 1, "of": 3, "peak_bytes": 0})
        end = self.ends.get(name, Status.OK)
        if isinstance(end, BaseException):
            raise end
        result = Result(status=end, spec=resolved.spec)
        result.write(folder / "result.json")
        return result

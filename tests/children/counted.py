"""The peak of a step of several recipes, traced and by c10's allocator.

Started by accelerate as ``tests.children.traced`` is, with ``allocations.cpp`` preloaded, which
counts what c10 takes and gives back in every thread. Rank 0 writes ``counted.json``: recipe -> the
traced categories, and ``allocated``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
from pathlib import Path
from typing import Any

from harness.memory.traced_step import trace_step
from harness.spec import Spec
from harness.worker import setup
from harness.worker.loop import Log, optimizer_step
from tests.children.traced import STEPS, each_recipe, living, ready

STANDING = ("parameters", "optimizer_state", "ema")
"""Categories that live all the time."""


def counted(spec: Spec, folder: Path) -> dict[str, Any]:
    """Two steps of ``spec``, one that is counted, and one that is traced."""
    allocator = ctypes.CDLL(None)
    for count in (allocator.c10_live_bytes, allocator.c10_peak_bytes):
        count.restype = ctypes.c_int64
    before, log = living(), Log()
    resolved, accelerator, feed = ready(spec)
    base = allocator.c10_live_bytes()
    run = setup.prepare(resolved, feed, accelerator, folder / "nvme", lambda phase: None)
    for step in range(STEPS):
        optimizer_step(run, step, log)
    gc.collect()
    allocator.c10_restart_peak()
    optimizer_step(run, STEPS, log)
    allocated = allocator.c10_peak_bytes() - base
    if "compiled" in resolved.launch.traits:
        # A traced step runs without compiled graphs: its gradients come in another order.
        return {"allocated": allocated}
    if not accelerator.is_main_process:
        optimizer_step(run, STEPS + 1, log)
        return {}
    held = [*vars(feed.dataset).values(), *before]
    found = trace_step(run.trained, "cpu", lambda: optimizer_step(run, STEPS + 1, log), held)
    # What is kept in host memory is the allocator's too, on a CPU.
    stands = {n: getattr(found, n) + getattr(found.host, n, 0) for n in STANDING}
    everywhere = found.everywhere or found.total
    return {**dataclasses.asdict(found), **stands, "total": everywhere, "allocated": allocated}


if __name__ == "__main__":
    each_recipe(counted, "counted.json")

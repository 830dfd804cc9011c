"""The peak of a step, traced and by c10's allocator.

Started by accelerate instead of ``harness.train``, with ``allocations.cpp`` preloaded, which counts
what c10 takes and gives back in every thread. Rank 0 writes ``counted.json``: traced categories,
and ``allocated``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import sys

import torch

from harness import train
from harness.json_files import write_json
from harness.memory.traced_step import trace_step
from harness.resolve import resolve
from harness.spec import from_arguments
from harness.worker import setup
from harness.worker.loop import optimizer_step

STEPS = 2
STANDING = ("parameters", "optimizer_state", "ema")
"""Categories that live all the time."""


def main() -> None:
    """Two steps, one that is counted, and one that is traced."""
    allocator = ctypes.CDLL(None)
    for count in (allocator.c10_live_bytes, allocator.c10_peak_bytes):
        count.restype = ctypes.c_int64
    gc.collect()
    before = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    options = train.parse_options(sys.argv[1:])
    resolved = resolve(from_arguments(options))
    accelerator = setup.make_accelerator(resolved)
    feed = setup.build_feed(resolved, accelerator)
    base = allocator.c10_live_bytes()
    run = setup.prepare(resolved, feed, accelerator, options.out / "nvme", lambda phase: None)
    for step in range(STEPS):
        optimizer_step(run, step)
    gc.collect()
    allocator.c10_restart_peak()
    optimizer_step(run, STEPS)
    allocated = allocator.c10_peak_bytes() - base
    if not accelerator.is_main_process:
        optimizer_step(run, STEPS + 1)
        return
    held = [*vars(feed.dataset).values(), *before]
    found = trace_step(run, "cpu", lambda: optimizer_step(run, STEPS + 1), held)
    # What is kept in host memory is the allocator's too, on a CPU.
    stands = {n: getattr(found, n) + getattr(found.host, n, 0) for n in STANDING}
    everywhere = found.everywhere or found.total
    told = {**dataclasses.asdict(found), **stands, "total": everywhere, "allocated": allocated}
    write_json(options.out / "counted.json", told)


if __name__ == "__main__":
    main()

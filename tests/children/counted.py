"""The peak of a step of several recipes: traced, by c10's allocator, and by torch's profiler.

Started by accelerate as ``tests.children.traced`` is, with ``allocations.cpp`` preloaded, which
counts what c10 takes and gives back in every thread. torch's profiler is thread-local: it does not
see what gloo's thread frees, which is some of what ZeRO communicates, and so counts too much. Where
it sees an address given out that it believes to be taken, ``Blocks`` knows better. It follows a
training from the set-up on, since it cannot count what is freed of what it has not seen made.
Rank 0 writes ``counted.json``: recipe -> the traced categories, ``allocated`` and ``profiled``.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from harness.memory.traced_step import trace_step
from harness.spec import Spec
from harness.worker import setup
from harness.worker.loop import Log, optimizer_step
from tests.children.traced import STEPS, each_recipe, living, ready

COUNTED = "the step that is counted"
STANDING = ("parameters", "optimizer_state", "ema")
"""Categories that live all the time."""


class Blocks:
    """Live blocks of memory by address."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.sizes: dict[int, int] = {}
        self.total = 0

    def make(self, start: int, size: int) -> None:
        """A block; those that it overlaps were freed unseen."""
        at = max(bisect.bisect_right(self.starts, start) - 1, 0)
        while at < len(self.starts) and self.starts[at] < start + size:
            known = self.starts[at]
            if known + self.sizes[known] > start:
                self.free(known)
            else:
                at += 1
        bisect.insort(self.starts, start)
        self.sizes[start] = size
        self.total += size

    def free(self, start: int) -> None:
        if start in self.sizes:
            self.total -= self.sizes.pop(start)
            del self.starts[bisect.bisect_left(self.starts, start)]


def profiled_peak(prof: profile) -> int:
    """Bytes of the fullest instant of the step that is counted, by the profiler."""
    events = list(flat(prof.profiler.kineto_results.experimental_event_tree()))
    begin = next(event.start_time_ns for event in events if event.name == COUNTED)
    memory = [event for event in events if event.name == "[memory]"]
    blocks, highest = Blocks(), 0
    for event in sorted(memory, key=lambda e: e.start_time_ns):
        fields = event.extra_fields
        if fields.alloc_size > 0:
            blocks.make(fields.ptr, fields.alloc_size)
        else:
            blocks.free(fields.ptr)
        if event.start_time_ns >= begin:
            highest = max(highest, blocks.total)
    return highest


def flat(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from flat(event.children)


def counted(spec: Spec, folder: Path) -> dict[str, Any]:
    """Two steps of ``spec``, one that is counted, and one that is traced."""
    allocator = ctypes.CDLL(None)
    for count in (allocator.c10_live_bytes, allocator.c10_peak_bytes):
        count.restype = ctypes.c_int64
    before, log = living(), Log()
    resolved, accelerator, feed = ready(spec)
    base = allocator.c10_live_bytes()
    profiling = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    leads = accelerator.is_main_process
    with profiling if leads else contextlib.nullcontext():
        run = setup.prepare(resolved, feed, accelerator, folder / "nvme", lambda phase: None)
        for step in range(STEPS):
            optimizer_step(run, step, log)
        gc.collect()
        allocator.c10_restart_peak()
        with record_function(COUNTED):
            optimizer_step(run, STEPS, log)
        allocated = allocator.c10_peak_bytes() - base
    if "compiled" in resolved.launch.traits:
        # A traced step runs without compiled graphs: its gradients come in another order.
        return {"allocated": allocated}
    if not leads:
        optimizer_step(run, STEPS + 1, log)
        return {}
    held = [*vars(feed.dataset).values(), *before]
    found = trace_step(run.trained, "cpu", lambda: optimizer_step(run, STEPS + 1, log), held)
    own = {"allocated": allocated, "profiled": profiled_peak(profiling)}
    # What is kept in host memory is the allocator's too, on a CPU.
    stands = {n: getattr(found, n) + getattr(found.host, n, 0) for n in STANDING}
    everywhere = found.everywhere or found.total
    return {**dataclasses.asdict(found), **stands, "total": everywhere, **own}


if __name__ == "__main__":
    each_recipe(counted, "counted.json")

"""Recordings of a run for other tools: a profiler's trace, and the allocator's history.

Both cost time and memory, so a recorded run is marked and never ranked. The profiler watches
steps of its own after the timed ones; the history runs from the start, for it must be there when
memory runs out.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from harness.launch import recordings

__all__ = ["allocator_history", "profiled_steps"]

WAIT, WARMUP, ACTIVE = 1, 1, 3
ENTRIES = 200_000
"""Allocations and frees that the history keeps, the newest: some tens of steps."""
SHOWN = 30


def profiled_steps(
    step: Callable[[], None], folder: Path, rank: int, device: torch.device
) -> list[dict[str, Any]]:
    """Five steps: one waits, one warms the profiler up, three are recorded, on rank 0 alone.

    The trace is written to ``folder/profile`` as ``*.pt.trace.json.gz``, which Perfetto, Chrome
    (chrome://tracing) and TensorBoard's profiler plug-in read. Returned are the key averages: the
    operations that took longest by themselves, in seconds and bytes of all recorded steps.
    """
    if rank != 0:
        for _ in range(WAIT + WARMUP + ACTIVE):
            step()
        return []
    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(
        activities=kinds,
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
        on_trace_ready=tensorboard_trace_handler(
            str(folder / recordings.PROFILE), "rank0", use_gzip=True
        ),
        profile_memory=True,
    ) as watching:
        for _ in range(WAIT + WARMUP + ACTIVE):
            step()
            watching.step()
    return _longest(watching.key_averages())


def _longest(averages: Any) -> list[dict[str, Any]]:
    rows = [
        {
            "name": event.key,
            "calls": event.count,
            "self_cpu_seconds": event.self_cpu_time_total / 1e6,
            "self_device_seconds": event.self_device_time_total / 1e6,
            "cpu_bytes": event.self_cpu_memory_usage,
            "device_bytes": event.self_device_memory_usage,
        }
        for event in averages
    ]
    rows.sort(key=lambda row: -max(row["self_device_seconds"], row["self_cpu_seconds"]))
    return rows[:SHOWN]


@contextlib.contextmanager
def allocator_history(folder: Path, rank: int) -> Iterator[None]:
    """Record the CUDA allocator's history; written at the end, also after an out-of-memory error.

    ``folder/snapshot.rankN.pickle`` is for pytorch.org/memory_viz. Where it cannot be written the
    run fails, for the history is what it was started for. If another error has ended the run, that
    one is raised, and the missing history only printed.
    """
    # The history is of the current device, and makes a context there: without this every rank would
    # have one on GPU 0 as well, for accelerate chooses each rank's own only later.
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # Stacks of C++ frames take a hundred times as long to note, and name torch's own code.
    torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")
    try:
        yield
    except BaseException:
        try:
            _write_history(folder, rank)
        except (OSError, RuntimeError) as error:  # a full disk, a device in an error state
            print(f"no allocator history of rank {rank}: {error}", file=sys.stderr)
        raise
    _write_history(folder, rank)


def _write_history(folder: Path, rank: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(recordings.history_file(folder, rank)))
    torch.cuda.memory._record_memory_history(enabled=None)

"""The training loop. It knows no strategy: what a recipe changes is inside what it runs."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from harness.data.feed import Batch, Feed
from harness.launch import command
from harness.subjects.objectives import Objective, Predict
from harness.worker import samples
from harness.worker.meter import Meter
from harness.worker.projections import Inputs
from strategies.engine import TrainingRun


@dataclass(kw_only=True)
class Run:
    """What the loop needs; ``digest`` names the initial weights, ``notes`` say how they were made
    where a reader should know."""

    trained: TrainingRun
    feed: Feed
    objective: Objective
    digest: str
    notes: list[str] = field(default_factory=list)


@dataclass
class Log:
    """What the loop writes down, step by step, without waiting for the device.

    ``earlier`` and ``earlier_norms`` are of the training that this one resumes. ``clipped`` is the
    gradient norm before and after the first clipping; None where nothing of ours clips.
    ``seconds`` and ``used`` are of the steps that a clock ran in, ``timed_from`` is the place
    among them of the first that counts. ``inputs`` is shown the batches of the first step, where
    somebody asks for them.
    """

    earlier: list[float] = field(default_factory=list)
    earlier_norms: list[float] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[Any] = field(default_factory=list)
    positions: list[list[np.ndarray]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    used: list[samples.Counts] = field(default_factory=list)
    timed_from: int = 0
    clipped: tuple[float, float] | None = None
    inputs: Inputs | None = None

    def all_losses(self, run: Run) -> list[float]:
        """Mean loss over all ranks, one a step; every rank takes part."""
        if not self.losses:
            return self.earlier
        mean = run.trained.engine.mean(run.trained, torch.stack(self.losses))
        return self.earlier + mean.tolist()

    def all_norms(self) -> list[float]:
        """Gradient norm before clipping, one a step, as long as there are gradients to have one."""
        return self.earlier_norms + [float(norm) for norm in self.norms if norm is not None]


def optimizer_step(run: Run, step: int, log: Log) -> None:
    """One optimizer step over this rank's share of global batch ``step``."""
    trained, losses, positions = run.trained, [], []

    def taken() -> Iterator[Batch]:
        for batch in run.feed.micro_batches(step):
            positions.append(batch.positions)
            if log.inputs is not None and not log.losses:
                log.inputs.add(batch)
            yield batch

    def loss_of(batch: Batch) -> torch.Tensor:
        def predict(x: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
            return trained.subject.predict(trained.model, x, t_B, batch.conditions)

        x, noise = trained.cut(batch.x), trained.cut(batch.noise)

        def true_loss(asked: Predict) -> torch.Tensor:
            return run.objective.loss(asked, x, batch.t, noise)

        if trained.supervise is not None:
            return trained.supervise(true_loss, predict, batch.conditions)
        return true_loss(predict).mean()

    def arrived() -> None:
        log.norms.append(gradient_norm(run, log))

    for loss in trained.engine.micro_steps(trained, taken(), loss_of, arrived):
        trained.micro_steps += 1
        losses.append(loss)
    for attachment in trained.attached.values():
        attachment.after_step()
    trained.optimizer_steps += 1
    log.losses.append(torch.stack(losses).float().mean())
    log.positions.append(positions)


def gradient_norm(run: Run, log: Log) -> Any:
    """Global gradient norm before clipping; clips by the spec where the engine does not."""
    trained, limit = run.trained, run.trained.settings.grad_clip
    if trained.gradient_norm is not None:
        return trained.gradient_norm()
    if limit and "own_clipping" not in trained.launch.traits:
        norm = trained.engine.clip(trained, limit)
        if log.clipped is None:  # checked once: a second norm in each step would slow it
            log.clipped = (float(norm), float(trained.engine.norm(trained)))
        return norm
    trained.accelerator.unscale_gradients()  # where a loss scale is in them; else nothing
    return trained.engine.norm(trained)


def timed_step(run: Run, step: int, log: Log, meter: Meter) -> None:
    """An optimizer step with the device idle at both ends, its seconds logged, and what the kernel
    counted for this process meanwhile.

    All ranks start together: else what one of them does between two steps (writing a status file)
    would count as the others' time, who wait for it in the first collective.
    """
    timed(lambda: optimizer_step(run, step, log), run.trained, log, meter)


def timed(step: Callable[[], Any], trained: TrainingRun, log: Log, meter: Meter) -> None:
    """``timed_step`` of any step."""
    meter.synchronize()
    trained.accelerator.wait_for_everyone()
    before = samples.now()
    start = time.perf_counter()
    step()
    meter.synchronize()
    log.seconds.append(time.perf_counter() - start)
    log.used.append(samples.now() - before)


# ---- record ----
# Recordings of a run for other tools: a profiler's trace, and the allocator's history.
#
# Both cost time and memory, so a recorded run is marked and never ranked. The profiler watches
# steps of its own after the timed ones; the history runs from the start, for it must be there when
# memory runs out.


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
            str(folder / command.PROFILE), "rank0", use_gzip=True
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
    torch.cuda.memory._dump_snapshot(str(command.history_file(folder, rank)))
    torch.cuda.memory._record_memory_history(enabled=None)

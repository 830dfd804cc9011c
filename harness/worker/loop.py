"""Training loop and recordings of a run. Strategies act only inside the objects that it calls."""

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

from harness.data.feed import Batch
from harness.launch import command
from harness.resolve import Resolved
from harness.subjects.objectives import Predict
from harness.worker import samples
from harness.worker.projections import Inputs
from harness.worker.samples import GpuWatch
from strategies.engine import TrainingRun


@dataclass
class Log:
    """Log of each step, written without waiting for the device.

    - ``earlier``, ``earlier_norms``: of the training that this one resumes.
    - ``clipped``: gradient norm before and after the first clipping; None if the harness clips
      nothing.
    - ``seconds``, ``used``: of the steps with a clock. ``timed_from`` is the index of the first of
      them that counts.
    - ``inputs``: reads the batches of the first step, if set.
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


@dataclass(kw_only=True)
class Run(TrainingRun):
    """One rank's run: the objects that strategies receive, and those of the worker.

    ``digest`` is a hash of the initial weights; ``notes`` describe unusual ones. A prediction has
    no ``folder``, ``reporter`` and ``meter``.
    """

    resolved: Resolved
    feed: Any = None  # a Feed; None if samples are drawn, or if a user's script feeds its model
    objective: Any = None  # an Objective; None in a user's script
    digest: str = ""
    notes: list[str] = field(default_factory=list)
    folder: Path = Path()
    reporter: Any = None  # a harness.worker.status.Reporter
    meter: Any = None  # a harness.worker.meter.Meter
    gpus: GpuWatch = field(default_factory=lambda: GpuWatch(0))
    log: Log = field(default_factory=Log)

    @property
    def baseline(self) -> tuple[Any, ...]:
        """Tensors that the meter's baseline includes: on a CPU the data, which is opened before it
        is taken. A GPU's allocator counts the data, so there are none."""
        on_gpu = self.accelerator.device.type == "cuda"
        return () if on_gpu else tuple(vars(self.feed.dataset).values())

    def step(self) -> None:
        """Run one more optimizer step, which no phase counts."""
        optimizer_step(self, self.optimizer_steps)

    def loss(self, batch: Batch) -> torch.Tensor:
        x, noise = self.cut(batch.x), self.cut(batch.noise)

        def predict(x: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
            return self.subject.predict(self.model, x, t_B, batch.conditions)

        def true_loss(asked: Predict) -> torch.Tensor:
            return self.objective.loss(asked, x, batch.t, noise)

        if self.supervise is not None:
            return self.supervise(true_loss, predict, batch.conditions)
        return true_loss(predict).mean()

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.objective.noisy(batch.x, batch.t, batch.noise), batch.t

    def all_losses(self) -> list[float]:
        """Return the mean loss of each step over all ranks; every rank must call it."""
        log = self.log
        if not log.losses:
            return log.earlier
        mean = self.accelerator.reduce(torch.stack(log.losses), reduction="mean")
        return log.earlier + mean.tolist()

    def all_norms(self) -> list[float]:
        """Return the gradient norm before clipping of each step that has gradients."""
        return self.log.earlier_norms + [float(n) for n in self.log.norms if n is not None]


def optimizer_step(run: Run, step: int) -> None:
    """Run one optimizer step on this rank's share of global batch ``step``."""
    log, losses, positions = run.log, [], []

    def taken() -> Iterator[Batch]:
        for batch in run.feed.micro_batches(step):
            positions.append(batch.positions)
            if log.inputs is not None and not log.losses:
                log.inputs.add(batch)
            yield batch

    def arrived() -> None:
        log.norms.append(gradient_norm(run))

    for loss in run.engine.micro_steps(run, taken(), arrived):
        run.micro_steps += 1
        losses.append(loss)
    for attachment in run.attached.values():
        attachment.after_step()
    run.optimizer_steps += 1
    log.losses.append(torch.stack(losses).float().mean())
    log.positions.append(positions)


def gradient_norm(run: Run) -> Any:
    """Return the global gradient norm before clipping. Clip as the spec says unless the engine
    does."""
    limit = run.settings.grad_clip
    if run.gradient_norm is not None:
        return run.gradient_norm()
    if limit and "own_clipping" not in run.launch.traits:
        norm = run.engine.norm(run, limit)
        if run.log.clipped is None:  # checked once: a second norm in each step would slow it
            run.log.clipped = (float(norm), float(run.engine.norm(run)))
        return norm
    run.accelerator.unscale_gradients()  # if gradients have a loss scale; else no effect
    return run.engine.norm(run)


def timed(run: Run) -> None:
    """Run a step with an idle device at both ends; log its seconds and kernel counts.

    All ranks start together. Otherwise one rank's work between steps, such as a status file, would
    count as time of the ranks that wait in the first collective.
    """
    run.meter.synchronize()
    run.accelerator.wait_for_everyone()
    before = samples.now()
    start = time.perf_counter()
    run.step()
    run.meter.synchronize()
    run.log.seconds.append(time.perf_counter() - start)
    run.log.used.append(samples.now() - before)


# ---- recordings for other tools ----
# Both recordings cost time and memory, so a recorded run is marked and never ranked. The profiler
# records extra steps after the timed ones. The allocator's history starts with the run, because it
# must exist when memory runs out.


WAIT, WARMUP, ACTIVE = 1, 1, 3
ENTRIES = 200_000
"""Allocations and frees that the history keeps, the newest: some tens of steps."""


def profiled_steps(step: Callable[[], None], folder: Path, rank: int, device: torch.device) -> None:
    """Run five steps: one waits, one warms the profiler up, and rank 0 records three.

    The trace is written to ``folder/profile`` as ``*.pt.trace.json.gz``, for Perfetto, Chrome
    (chrome://tracing) and TensorBoard's profiler plug-in.
    """
    if rank != 0:
        for _ in range(WAIT + WARMUP + ACTIVE):
            step()
        return
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


@contextlib.contextmanager
def allocator_history(folder: Path, rank: int) -> Iterator[None]:
    """Record the CUDA allocator's history; write it at the end, also after an out-of-memory error.

    ``folder/snapshot.rankN.pickle`` is for pytorch.org/memory_viz. The run fails if it cannot be
    written, because the run's purpose is the history. If another error ended the run, that error is
    raised and the failure to write is only printed.
    """
    # The history is of the current device, and creates a context there. Without this every rank
    # would have a context on GPU 0 too, because accelerate sets each rank's device only later.
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # C++ stack frames take a hundred times as long to record, and name torch's own code.
    torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")
    failed = True
    try:
        yield
        failed = False
    finally:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(command.history_file(folder, rank)))
            torch.cuda.memory._record_memory_history(enabled=None)
        except (OSError, RuntimeError) as error:  # a full disk, a device in an error state
            if not failed:
                raise
            print(f"no allocator history of rank {rank}: {error}", file=sys.stderr)

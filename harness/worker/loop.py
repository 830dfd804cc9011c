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
from harness.subjects.objectives import Predict
from harness.worker import samples
from harness.worker.meter import Meter
from harness.worker.projections import Inputs
from strategies.engine import TrainingRun


@dataclass(kw_only=True)
class Run:
    """Objects that the loop needs. ``feed`` is None if samples are drawn. ``digest`` is a hash of
    the initial weights; ``notes`` describe unusual initial weights."""

    trained: TrainingRun
    feed: Any  # a Feed, or None
    objective: Any  # an Objective, or None in a user's script
    digest: str
    notes: list[str] = field(default_factory=list)


@dataclass
class Log:
    """Log of each step, written without waiting for the device.

    - ``earlier``, ``earlier_norms``: of the training that this one resumes.
    - ``clipped``: gradient norm before and after the first clipping; None if the harness clips
      nothing.
    - ``seconds``, ``used``: of the steps with a clock. ``timed_from`` is the index of the first of
      them
    that counts.
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

    def all_losses(self, run: Run) -> list[float]:
        """Return the mean loss of each step over all ranks; every rank must call it."""
        if not self.losses:
            return self.earlier
        mean = run.trained.accelerator.reduce(torch.stack(self.losses), reduction="mean")
        return self.earlier + mean.tolist()

    def all_norms(self) -> list[float]:
        """Return the gradient norm before clipping of each step that has gradients."""
        return self.earlier_norms + [float(norm) for norm in self.norms if norm is not None]


@dataclass(frozen=True)
class StepLoss:
    """Forward pass of a run's step; a call returns the scalar loss of a batch."""

    run: Run

    def __call__(self, batch: Batch) -> torch.Tensor:
        trained = self.run.trained

        def predict(x: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
            return trained.subject.predict(trained.model, x, t_B, batch.conditions)

        x, noise = trained.cut(batch.x), trained.cut(batch.noise)

        def true_loss(asked: Predict) -> torch.Tensor:
            return self.run.objective.loss(asked, x, batch.t, noise)

        if trained.supervise is not None:
            return trained.supervise(true_loss, predict, batch.conditions)
        return true_loss(predict).mean()

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the noisy samples and timesteps that the model is given, for an engine that calls
        the first and last layers apart (pipeline stages)."""
        return self.run.objective.noisy(batch.x, batch.t, batch.noise), batch.t


def optimizer_step(run: Run, step: int, log: Log) -> None:
    """Run one optimizer step on this rank's share of global batch ``step``."""
    trained, losses, positions = run.trained, [], []

    def taken() -> Iterator[Batch]:
        for batch in run.feed.micro_batches(step):
            positions.append(batch.positions)
            if log.inputs is not None and not log.losses:
                log.inputs.add(batch)
            yield batch

    def arrived() -> None:
        log.norms.append(gradient_norm(run, log))

    for loss in trained.engine.micro_steps(trained, taken(), StepLoss(run), arrived):
        trained.micro_steps += 1
        losses.append(loss)
    for attachment in trained.attached.values():
        attachment.after_step()
    trained.optimizer_steps += 1
    log.losses.append(torch.stack(losses).float().mean())
    log.positions.append(positions)


def gradient_norm(run: Run, log: Log) -> Any:
    """Return the global gradient norm before clipping. Clip as the spec says unless the engine
    does."""
    trained, limit = run.trained, run.trained.settings.grad_clip
    if trained.gradient_norm is not None:
        return trained.gradient_norm()
    if limit and "own_clipping" not in trained.launch.traits:
        norm = trained.engine.norm(trained, limit)
        if log.clipped is None:  # checked once: a second norm in each step would slow it
            log.clipped = (float(norm), float(trained.engine.norm(trained)))
        return norm
    trained.accelerator.unscale_gradients()  # if gradients have a loss scale; else no effect
    return trained.engine.norm(trained)


def timed(step: Callable[[], Any], trained: TrainingRun, log: Log, meter: Meter) -> None:
    """Run ``step`` with an idle device at both ends; log its seconds and kernel counts.

    All ranks start together. Otherwise one rank's work between steps, such as a status file, would
    count as time of the ranks that wait in the first collective.
    """
    meter.synchronize()
    trained.accelerator.wait_for_everyone()
    before = samples.now()
    start = time.perf_counter()
    step()
    meter.synchronize()
    log.seconds.append(time.perf_counter() - start)
    log.used.append(samples.now() - before)


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

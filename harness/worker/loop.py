"""The training loop. It knows no strategy: what a recipe changes is inside what it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from harness.data.feed import Batch, Feed
from harness.subjects.objectives import Objective, Predict
from harness.worker.measuring import usage
from harness.worker.measuring.meter import Meter
from harness.worker.projections import Inputs
from strategies.engine import Trained

__all__ = ["Log", "Run", "optimizer_step", "timed", "timed_step"]


@dataclass(kw_only=True)
class Run:
    """What the loop needs; ``digest`` names the initial weights, ``notes`` say how they were made
    where a reader should know."""

    trained: Trained
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
    used: list[usage.Counts] = field(default_factory=list)
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


def timed(step: Callable[[], Any], trained: Trained, log: Log, meter: Meter) -> None:
    """``timed_step`` of any step."""
    meter.synchronize()
    trained.accelerator.wait_for_everyone()
    before = usage.now()
    start = time.perf_counter()
    step()
    meter.synchronize()
    log.seconds.append(time.perf_counter() - start)
    log.used.append(usage.now() - before)

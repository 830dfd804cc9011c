"""The training loop. It knows no strategy: what a recipe changes is inside what it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from harness import data
from harness.diffusion import Objective
from harness.meter import Meter
from strategies.base import Trained

__all__ = ["Log", "Run", "optimizer_step", "timed_step"]


@dataclass(kw_only=True)
class Run:
    """What the loop needs; ``digest`` names the initial weights."""

    trained: Trained
    feed: data.Feed
    objective: Objective
    digest: str


@dataclass
class Log:
    """What the loop writes down, step by step, without waiting for the device.

    ``earlier`` and ``earlier_norms`` are of the training that this one resumes. ``clipped`` is the
    gradient norm before and after the first clipping; None where nothing of ours clips.
    """

    earlier: list[float] = field(default_factory=list)
    earlier_norms: list[float] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[Any] = field(default_factory=list)
    positions: list[list[np.ndarray]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    clipped: tuple[float, float] | None = None

    def all_losses(self, run: Run) -> list[float]:
        """Mean loss over all ranks, one a step; every rank takes part."""
        if not self.losses:
            return self.earlier
        stacked = torch.stack(self.losses)
        mean = run.trained.accelerator.reduce(stacked, reduction="mean")
        return self.earlier + mean.tolist()

    def all_norms(self) -> list[float]:
        """Gradient norm before clipping, one a step, as long as there are gradients to have one."""
        return self.earlier_norms + [float(norm) for norm in self.norms if norm is not None]


def optimizer_step(run: Run, step: int, log: Log) -> None:
    """One optimizer step over this rank's share of global batch ``step``."""
    trained, accelerator = run.trained, run.trained.accelerator
    losses, positions = [], []
    for batch in run.feed.micro_batches(step):
        with accelerator.accumulate(trained.model):
            loss = run.objective.loss(
                trained.model, batch.x, batch.y, batch.t, batch.noise, batch.drop
            ).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                log.norms.append(gradient_norm(run, log))
            trained.optimizer.step()
            trained.optimizer.zero_grad()
        trained.micro_steps += 1
        losses.append(loss.detach())
        positions.append(batch.positions)
    for attachment in trained.attached.values():
        attachment.after_step()
    trained.optimizer_steps += 1
    log.losses.append(torch.stack(losses).float().mean())
    log.positions.append(positions)


def gradient_norm(run: Run, log: Log) -> Any:
    """Global gradient norm before clipping; clips by the spec where the engine does not."""
    trained = run.trained
    if trained.gradient_norm is not None:
        return trained.gradient_norm()
    if trained.engine is not None:
        return trained.engine.get_global_grad_norm()
    parameters = [p for p in trained.module.parameters() if p.grad is not None]
    if trained.settings.grad_clip:
        norm = trained.accelerator.clip_grad_norm_(parameters, trained.settings.grad_clip)
        if log.clipped is None:  # once is a proof, and each time would cost every step
            after = torch.nn.utils.get_total_norm([p.grad for p in parameters])
            log.clipped = (float(norm), float(after))
        return norm
    trained.accelerator.unscale_gradients()  # where a loss scale is in them; else nothing
    # clip_grad_norm_ with an infinite limit would still multiply every gradient by one.
    gradients = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in parameters]
    return torch.nn.utils.get_total_norm(gradients)


def timed_step(run: Run, step: int, log: Log, meter: Meter) -> None:
    """An optimizer step with the device idle at both ends, its seconds logged.

    All ranks start together: what one of them did between two steps (a status file) would count
    as the others' wait in the first collective.
    """
    meter.synchronize()
    run.trained.accelerator.wait_for_everyone()
    start = time.perf_counter()
    optimizer_step(run, step, log)
    meter.synchronize()
    log.seconds.append(time.perf_counter() - start)

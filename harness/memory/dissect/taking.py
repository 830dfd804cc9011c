"""The portrait of a run: a few more steps, each looked at in another way."""

from __future__ import annotations

from typing import Any

import torch

from harness.anatomy import phase_marks, trace_step
from harness.dissect.costs import Costs, bandwidth, peak_flops
from harness.dissect.modules import Stack, saving
from harness.dissect.sweep import points
from harness.dissect.timeline import Film
from harness.loop import Log, Run, optimizer_step
from harness.meter import Meter
from harness.portrait import Kept, OpCost, Portrait, Timeline
from harness.resolve import Resolved
from strategies.support import forward

__all__ = ["take"]

OPS = 40


def take(resolved: Resolved, run: Run, log: Log, meter: Meter) -> Portrait:
    """Look at this rank's next steps; every rank takes part, and each gets its own portrait.

    The peak of the step is traced twice, with and without the module hooks and saved-tensors
    hooks, so that a page can show that looking changed nothing.
    """
    device = run.trained.accelerator.device
    held = () if device.type == "cuda" else list(vars(run.feed.dataset).values())
    plain = trace_step(run.trained, device.type, lambda: _step(run, log), held)
    film, kept, saved = _film(run, log, device, held)
    inference = _inference(run, device, held)
    dtype = _dtype(run)
    shape = resolved.shape
    elsewhere = sum(row.made for row in kept if not row.module)
    return Portrait(
        recipe=str(resolved.recipe),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=str(dtype).removeprefix("torch."),
        global_batch=resolved.spec.global_batch,
        micro_batch=resolved.micro_batch,
        processes=resolved.spec.processes,
        world=resolved.spec.world,
        model=resolved.spec.model,
        tokens=shape.tokens(resolved.facts.input_size),
        hidden=shape.hidden_size,
        depth=shape.depth,
        heads=shape.num_heads,
        parameters=resolved.parameters,
        step_peak_bytes=plain.total,
        timeline=film.timeline(),
        lumps=film.lumps(),
        kept=kept,
        kept_elsewhere=elsewhere,
        saved_total=saved,
        inference=inference,
        ops=_costs(run, log, meter),
        peak_flops=peak_flops(device, dtype, meter.synchronize),
        bandwidth=bandwidth(device, meter.synchronize),
        points=list(points(device, dtype)),
    )


def _step(run: Run, log: Log) -> None:
    optimizer_step(run, run.trained.optimizer_steps, log)


def _film(run: Run, log: Log, device: torch.device, held: Any) -> tuple[Film, list[Kept], int]:
    """One step with every storage followed and every saved tensor booked."""
    trained, stack = run.trained, Stack(run.trained.module)
    film = Film(trained, device.type, stack, held)
    known = {p.untyped_storage()._cdata for p in trained.module.parameters()}
    first: dict[int, tuple[str, int]] = {}
    handles = [
        p.register_hook(film.mark_gradient) for p in trained.module.parameters() if p.requires_grad
    ]
    with stack.watching(), saving(stack, known) as saved:

        def enter(phase: str) -> None:
            if phase == "backward" and not first:
                first.update(saved)
            film.enter(phase)

        with phase_marks(trained, enter), film:
            _step(run, log)
        film.finish()
    for handle in handles:
        handle.remove()
    return film, film.kept(first), sum(size for _, size in first.values())


def _inference(run: Run, device: torch.device, held: Any) -> Timeline:
    """A forward pass of one micro batch without gradients, as a sampler runs it."""
    trained, stack = run.trained, Stack(run.trained.module)
    batch = next(iter(run.feed.micro_batches(trained.optimizer_steps)))
    trained.model.eval()
    film = Film(trained, device.type, stack, held)
    with stack.watching(), torch.no_grad(), film:
        film.enter("inference")
        trained.model(batch.x, batch.t, batch.y, batch.drop)
    film.finish()
    trained.model.train()
    return film.timeline()


def _costs(run: Run, log: Log, meter: Meter) -> list[OpCost]:
    costs = Costs(meter.synchronize)
    with phase_marks(run.trained, costs.enter), costs:
        _step(run, log)
    return costs.table()[:OPS]


def _dtype(run: Run) -> torch.dtype:
    """The type in which the recipe's matrix products ran."""
    return getattr(torch, forward.compute_dtype(run.trained))

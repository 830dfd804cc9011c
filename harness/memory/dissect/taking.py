"""The portrait of a run: a few more steps, each looked at in another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from harness.memory.dissect.costs import Costs, bandwidth, peak_flops
from harness.memory.dissect.modules import Stack, saving
from harness.memory.dissect.sweep import points
from harness.memory.dissect.timeline import TimelineTracer
from harness.memory.portrait import Kept, OpCost, Portrait, Timeline
from harness.memory.traced_step import following, register_living, trace_step
from harness.resolve import Resolved
from harness.result import reported_name
from strategies.engine import Trained
from strategies.evidence import forward
from strategies.evidence.stored import stored

__all__ = ["Look", "take"]

OPS = 40


class Look(NamedTuple):
    """What a portrait needs of a rank: ``step`` takes one more optimizer step, ``infer`` runs the
    model over a micro batch, ``synchronize`` waits for the device; ``left_out`` are tensors that
    the meter's baseline holds already."""

    step: Callable[[], None]
    infer: Callable[[], Any]
    synchronize: Callable[[], None]
    left_out: tuple[Any, ...]


def take(resolved: Resolved, trained: Trained, look: Look) -> Portrait:
    """The portrait of this rank, from its next steps; every rank takes part, and each gets its own.

    The peak of the step is traced twice, with and without the module hooks and saved-tensors
    hooks, so that a page can show that looking changed nothing.
    """
    device = trained.accelerator.device
    plain = trace_step(trained, device.type, look.step, look.left_out)
    tracer, kept, saved = _traced(trained, look)
    inference = _inference(trained, look)
    dtype = getattr(torch, forward.compute_dtype(trained))
    size = resolved.subject.dimensions
    elsewhere = sum(row.made for row in kept if not row.module)
    return Portrait(
        recipe=str(resolved.recipe),
        device=reported_name(torch.cuda.get_device_name(device))
        if device.type == "cuda"
        else "cpu",
        dtype=str(dtype).removeprefix("torch."),
        global_batch=resolved.spec.global_batch,
        micro_batch=resolved.micro_batch,
        processes=resolved.spec.processes,
        world=resolved.spec.world,
        model=resolved.spec.model,
        tokens=size.tokens,
        hidden=size.width,
        depth=size.depth,
        heads=size.heads,
        parameters=resolved.subject.parameters,
        step_peak_bytes=plain.everywhere,
        timeline=tracer.timeline(),
        lumps=tracer.lumps(),
        kept=kept,
        kept_elsewhere=elsewhere,
        saved_total=saved,
        inference=inference,
        ops=_costs(trained, look),
        peak_flops=peak_flops(device, dtype, look.synchronize),
        bandwidth=bandwidth(device, look.synchronize),
        points=list(points(resolved.subject, device, dtype)),
    )


def _traced(trained: Trained, look: Look) -> tuple[TimelineTracer, list[Kept], int]:
    """One step with every storage followed and every saved tensor counted."""
    stack = Stack(trained.module)
    tracer = _begun(trained, stack, look)
    weights = [t for p in trained.module.parameters() for t in stored(p.data)]
    known = {t.untyped_storage()._cdata for t in weights}
    first: dict[int, tuple[str, int]] = {}
    with stack.watching(), saving(stack, known) as saved:
        tracer.on_backward = lambda: first.update(saved if not first else {})
        with following(tracer, trained), tracer:
            look.step()
        tracer.finish()
    return tracer, tracer.kept(first), sum(size for _, size in first.values())


def _begun(trained: Trained, stack: Stack, look: Look) -> TimelineTracer:
    tracer = TimelineTracer(trained, trained.accelerator.device.type, stack)
    tracer.leave_out(look.left_out)
    register_living(tracer, trained)
    return tracer


def _inference(trained: Trained, look: Look) -> Timeline:
    """A forward pass of one micro batch without gradients, as a sampler runs it."""
    stack = Stack(trained.module)
    trained.model.eval()
    tracer = _begun(trained, stack, look)
    with stack.watching(), torch.no_grad(), tracer:
        tracer.enter("inference")
        look.infer()
    tracer.finish()
    trained.model.train()
    return tracer.timeline()


def _costs(trained: Trained, look: Look) -> list[OpCost]:
    costs = Costs(look.synchronize)
    with trained.engine.marks(trained, costs.enter), costs:
        look.step()
    return costs.table()[:OPS]

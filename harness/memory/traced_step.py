"""Trace one training step: storages alive before it, its phases, and its peak."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from harness.memory.record import step_categories
from harness.memory.tracer import BEFORE, BY_DEVICE, DEVICE, HOST, Tracer
from harness.result import Categories
from strategies.engine import TrainingRun


@contextlib.contextmanager
def following(tracer: Tracer, run: TrainingRun) -> Iterator[None]:
    """Trace a step: its phases, its gradients when they are computed, and the allocations by the
    engine's library and the strategies."""

    def enter(phase: str) -> None:
        tracer.enter(phase)
        if phase == "optimizer":
            tracer.tag_gradients(run)

    def arrived(gradient: torch.Tensor) -> None:
        tracer.see(gradient, "gradient")
        tracer.tag("gradients", [gradient])

    points = run.engine.trace_points(run)
    kept = run.attached.values()
    leaves = [*points.leaves, *(leaf for a in kept for leaf in a.leaves())]
    handles = [leaf.register_hook(arrived) for leaf in leaves]
    makers = [*points.scopes, *(m for a in kept for m in a.makers())]
    try:
        with run.engine.phase_hooks(run, enter), tracer.watching(makers):
            yield
    finally:
        for handle in handles:
            handle.remove()


def register_living(tracer: Tracer, run: TrainingRun) -> None:
    """Register the tensors alive before a measured step.

    Parameters, optimizer state and averages get their category; the process's other tensors get
    none.
    """
    tracer.enter(BEFORE)
    inventory = run.engine.held(run)
    # If Python has seen DDP's buckets (a communication hook gets them), they are known.
    if inventory.hidden and run.accelerator.device.type in tracer.pools:
        tracer.hold("device", inventory.hidden, "communication buckets", "buckets")
        tracer.hidden = True
    tracer.left_out |= inventory.seen
    kept = [t for a in run.attached.values() for t in a.tensors()]
    for tensor in (*(t for some in inventory.tensors.values() for t in some), *kept):
        tracer.see(tensor, BEFORE)
    gc.collect()  # objects that only cycles keep alive do not belong to the step
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and not thing.is_sparse:
            tracer.see(thing, BEFORE)
    tracer.know(run)


def trace_step(
    run: TrainingRun, device_type: str, step: Callable[[], None], left_out: Iterable[Any] = ()
) -> Categories:
    """Trace ``step`` once and return the categories alive at its peak on ``device_type``.

    If that is the CPU, device and host memory are distinguished (``harness.memory.tracer``).

    ``left_out``: tensors that the meter's baseline already includes (data resident on a CPU).
    """
    with tracing(run, device_type, left_out) as tracer:
        step()
    return categories_of(tracer, run)


@contextlib.contextmanager
def tracing(
    run: TrainingRun,
    device_type: str,
    left_out: Iterable[Any] = (),
    known: Mapping[str, Iterable[Any]] = MappingProxyType({}),
) -> Iterator[Tracer]:
    """Return a context that traces the step within it, as ``trace_step``.

    ``known``: category -> further tensors that are alive before the step.
    """
    tracer = Tracer({device_type: DEVICE})
    if run.accelerator.device.type != "cpu":
        tracer.places = None  # each tensor's device is its placement
    tracer.leave_out(left_out)
    register_living(tracer, run)
    for category, tensors in known.items():
        tracer.tag(category, tensors)
    with following(tracer, run), tracer:
        yield tracer
    run.ops |= tracer.ops


def categories_of(tracer: Tracer, run: TrainingRun) -> Categories:
    """Return the categories alive at the peak of a traced step on the device, with the peak in host
    memory beside them."""
    record, buckets = tracer.record, run.engine.buckets
    if tracer.places is None:
        found = step_categories(record, DEVICE, buckets)
        found.placed_by = BY_DEVICE
        return found
    tracer.keep_held(run)
    tracer.disbelieve()
    found, host = (step_categories(record, pool, buckets) for pool in (DEVICE, HOST))
    found.host = host if host.total else None
    found.placed_by = tracer.places.known_by
    return found

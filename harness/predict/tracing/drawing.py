"""A batch of samples, drawn for real on tensors without storage, as a step of a prediction."""

from __future__ import annotations

import dataclasses
import gc

from harness.memory.traced_step import following
from harness.predict.tracing import world
from harness.predict.tracing.trace import StoragelessTracer
from harness.predict.tracing.work import Counter
from harness.resolve import Resolved
from harness.worker.drawing.prepare import prepare
from strategies.engine import Imitation

__all__ = ["draw"]


def draw(
    resolved: Resolved, imitation: Imitation, tracer: StoragelessTracer, counter: Counter
) -> int:
    """Set up and draw one batch, followed by ``tracer`` and ``counter``: nothing that a first batch
    makes is left for a second. Returns the event at which it began."""
    accelerator = world.make_accelerator(resolved, imitation)
    drawing, _ = prepare(_without_file(resolved), accelerator, tracer.enter)
    trained = drawing.trained
    finish = imitation.prepared(trained, tracer)
    gc.collect()  # what only cycles keep alive would die at any moment
    tracer.know(trained)
    counter.begin()
    first = len(tracer.record.events)
    with following(tracer, trained):
        drawing.step()
    tracer.know(trained)
    finish()
    return first


def _without_file(resolved: Resolved) -> Resolved:
    """The same with weights as they are drawn: a prediction wants none of their values."""
    return dataclasses.replace(resolved, weights="")

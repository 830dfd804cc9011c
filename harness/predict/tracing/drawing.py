"""Samples drawn for real on tensors without storage: a batch as a step of a prediction, and the
forward pass of a validation."""

from __future__ import annotations

import dataclasses
import gc
from unittest import mock

import torch

from harness.memory.record import running
from harness.memory.traced_step import following
from harness.predict.tracing import world
from harness.predict.tracing.trace import StoragelessTracer
from harness.predict.tracing.work import Counter
from harness.resolve import Resolved
from harness.worker.drawing.prepare import prepare
from strategies.engine import Imitation, Trained

__all__ = ["denoised", "draw"]


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


def denoised(trained: Trained, tracer: StoragelessTracer) -> int:
    """Bytes of the device at the fullest instant of one forward pass without gradients beside a
    training's state. The pass is of two samples, as guidance takes them, or of one if the scale of
    guidance is an input of the model. The trace keeps nothing of it."""
    gc.collect()
    subject, record, first = trained.subject, tracer.record, len(tracer.record.events)
    config = {**subject.family.defaults, **subject.config} if hasattr(subject, "family") else {}
    count = 1 if config.get("guidance_embeds") else 2
    uncounted = mock.patch.multiple(tracer, witness=_ignored, moved=_ignored)  # no step's work
    with uncounted, torch.no_grad(), tracer.watching(trained.engine.makers()):
        x, t_B, conditions = subject.example(trained.accelerator.device)
        x, t_B, *given = (torch.cat([one] * count) for one in (x, t_B, *conditions.values()))
        told = dict(zip(conditions, given, strict=True))
        subject.predict(trained.model, trained.cut(x), t_B, told)
    most = max(running(record, "device")[first:], default=0)
    tracer.drop_from(first)
    return most


def _ignored(*_: object) -> None:
    pass

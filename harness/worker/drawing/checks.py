"""Was what was drawn what was asked for? The audit of a sampling run.

What is found is read from the calls of the model and from the samples themselves; a row with one
failed check is void and never ranked.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from harness.resolve import Resolved
from harness.result import Check
from harness.worker.audit import gather
from harness.worker.drawing.batch import Drawing, digest, noise_of
from strategies.evidence.updates import relative_error

__all__ = ["AGAIN", "audit"]

AGAIN = 1e-3
"""Relative distance of a batch to the same drawn again in this process: the model did not move."""


def audit(resolved: Resolved, drawing: Drawing, kept: Tensor) -> list[Check]:
    """The checks that hold for every recipe.

    Args:
        drawing: behind a watched batch.
        kept: the samples of the last timed batch, on this rank; every rank asks.
    """
    spec, trained = resolved.spec, drawing.trained
    accelerator, shape = trained.accelerator, resolved.subject.data.sample_shape
    apart = relative_error(drawing.drawn.double(), kept.double())
    gradients = [p for p in trained.module.parameters() if p.requires_grad or p.grad is not None]
    ranks = gather(trained, digest(kept))
    rows = [
        ("processes", spec.processes, accelerator.num_processes),
        ("device", spec.device, accelerator.device.type),
        ("engine", resolved.launch.engine.file.kind, accelerator.distributed_type.value),
        ("samples", [spec.global_batch, *shape], list(kept.shape)),
        ("calls of the model", _asked_calls(resolved), _found_calls(drawing)),
        ("noise", digest(noise_of(resolved)), drawing.began),
        ("samples finite", True, bool(torch.isfinite(kept).all())),
        ("eval mode", True, not trained.module.training),
        ("parameters with a gradient", 0, len(gradients)),
        ("drawn again alike", True, apart <= AGAIN),
    ]
    if len(ranks) > 1:
        rows.append(("samples of all ranks alike", 1, len(set(ranks))))
    return [Check(name=n, asked=a, found=f, ok=a == f) for n, a, f in rows]


def _asked_calls(resolved: Resolved) -> dict[str, int]:
    """Samples a call -> calls, by closed form."""
    spec, apart = resolved.spec, resolved.recipe.guides_apart
    halves = 1 if spec.scale == 1 else 2
    size = spec.global_batch * (1 if apart else halves)
    return {str(size): resolved.evaluations * (halves if apart else 1)}


def _found_calls(drawing: Drawing) -> dict[str, int]:
    return {str(size): count for size, count in Counter(drawing.calls).items()}

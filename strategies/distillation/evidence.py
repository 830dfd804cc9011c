"""What a watched step shows of a lesson: that all its terms were in the loss that was
differentiated, by their weights, and that they were taken against the teacher.

Everything is computed anew here: what the teacher says of what the student was given, and the
gradient that the student's output must then get.

Imports torch: import it where torch is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from strategies.base import demand
from strategies.distillation.teacher import Lesson, Moment, Teacher, relative, squared
from strategies.evidence.rules import label, relative_error

CLOSE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Type of the output -> how far its gradient may be from the one expected, as a share of it."""
CLOSE_ROUNDED = 3e-2
"""The same where outputs are of 16 bits."""


@contextlib.contextmanager
def watched(lesson: Lesson) -> Iterator[list[Moment]]:
    """While it lasts, each micro step leaves a moment."""
    lesson.moments = []
    try:
        yield lesson.moments
    finally:
        lesson.moments = None


def shown(moments: list[Moment], teacher: Teacher, weights: Mapping[str, float]) -> dict[str, Any]:
    """The weight of each term in what was differentiated, and how far the student is from its
    teacher.

    Raises:
        NotInForce: a term is missing, has another weight, or is of another teacher.
    """
    demand(bool(moments), "no loss was taken against a teacher in the watched step")
    first, weighed = moments[0], [_weighed(moment, weights) for moment in moments]
    with teacher.uncounted():
        target, wanted = teacher.ask(first.x, first.t_B, first.conditions)
    if weights["output"]:
        _same("output", first.values["output"], float(squared(first.out, target)))
    if weights["feature"]:
        pairs = zip(first.states, wanted, strict=True)
        found = torch.stack([relative(*pair) for pair in pairs]).mean()
        _same("feature", first.values["feature"], float(found))
    off = _output_gradient(first, target, weights)
    away = relative_error(first.out.double(), target.double())
    facts = {
        "weights_in_backward": weighed[0],
        "output_gradient_away": float(f"{off:.2g}"),
        "away_from_teacher": round(away, 4),
    }
    # What one term alone weighs cannot be told from what all have in common.
    return label(facts, "weights_in_backward") if len(weighed[0]) == 1 else facts


def _weighed(moment: Moment, weights: Mapping[str, float]) -> dict[str, float]:
    """The gradients that came to the terms, which are as their weights are, up to what all have in
    common: shares of an accumulation, a loss scale."""
    wanted = {name: weight for name, weight in weights.items() if weight}
    came = {name: value for name, value in moment.arrived.items() if value}
    missing = sorted(wanted.keys() - came.keys())
    demand(not missing, f"{', '.join(missing)} is not in the loss that was differentiated")
    scale = sum(came.values()) / sum(wanted.values())
    off = max(abs(came[name] / scale - weight) for name, weight in wanted.items())
    demand(off < 1e-3, f"terms were weighed as {came}, not as {wanted}")
    return {name: round(came[name] / scale, 6) for name in wanted}


def _same(name: str, took: float, found: float) -> None:
    close = abs(took - found) <= 1e-2 * abs(found)
    demand(close, f"{name} was {took:.4g}, and against the teacher it is {found:.4g}")


def _output_gradient(moment: Moment, target: Any, weights: Mapping[str, float]) -> float:
    """How far the gradient that came to the output is from that of both terms together."""
    demand(moment.gradient is not None, "no gradient came to the student's output")
    leaf = moment.out.clone().requires_grad_()
    with torch.enable_grad():
        loss = weights["true"] * moment.true_loss(lambda x, t_B: leaf).mean()
        loss = loss + weights["output"] * squared(leaf, target)
        (expected,) = torch.autograd.grad(loss, leaf)
    came, expected = moment.gradient.double().flatten(), expected.double().flatten()
    scale = (came @ expected) / (expected @ expected).clamp_min(1e-300)
    demand(float(scale) > 0, "the gradient of the output points away from the loss's")
    off = relative_error(came, scale * expected)
    most = CLOSE.get(moment.out.dtype, CLOSE_ROUNDED)
    demand(off <= most, f"the output's gradient is {off:.2g} away from that of the terms asked for")
    return off

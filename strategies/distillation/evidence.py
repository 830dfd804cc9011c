"""Evidence of distillation from a watched step: the loss terms and their weights.

The teacher's outputs for the student's inputs are computed again, and so is the gradient that the
student's output must get.

Imports torch.
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
"""Type of the output -> largest relative distance of its gradient from the expected one."""
CLOSE_ROUNDED = 3e-2
"""The same for 16-bit outputs."""


@contextlib.contextmanager
def watched(lesson: Lesson) -> Iterator[list[Moment]]:
    """Record a ``Moment`` for each micro step inside the context."""
    lesson.moments = []
    try:
        yield lesson.moments
    finally:
        lesson.moments = None


def shown(moments: list[Moment], teacher: Teacher, weights: Mapping[str, float]) -> dict[str, Any]:
    """Return the weight of each term in the differentiated loss, and the student's distance from
    its teacher.

    Raises:
        NotInForce: a term is missing, has another weight, or is of another teacher.
    """
    demand(bool(moments), "the recorded step computed no loss against a teacher")
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
    # The weight of a single term cannot be separated from the common factor.
    return label(facts, "weights_in_backward") if len(weighed[0]) == 1 else facts


def _weighed(moment: Moment, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of the terms, from the gradients that reached them.

    The gradients equal the weights up to a common factor: accumulation, loss scale.
    """
    wanted = {name: weight for name, weight in weights.items() if weight}
    came = {name: value for name, value in moment.arrived.items() if value}
    missing = sorted(wanted.keys() - came.keys())
    demand(not missing, f"{', '.join(missing)} is not a term of the loss")
    scale = sum(came.values()) / sum(wanted.values())
    off = max(abs(came[name] / scale - weight) for name, weight in wanted.items())
    demand(off < 1e-3, f"the weights of the loss terms were {came}, expected {wanted}")
    return {name: round(came[name] / scale, 6) for name in wanted}


def _same(name: str, took: float, found: float) -> None:
    close = abs(took - found) <= 1e-2 * abs(found)
    demand(close, f"the loss term {name} was {took:.4g}, expected {found:.4g} against the teacher")


def _output_gradient(moment: Any, target: Any, weights: Mapping[str, float]) -> float:
    """Return the relative distance of the output's gradient from that of both terms together."""
    demand(moment.gradient is not None, "the student's output had no gradient")
    leaf = moment.out.clone().requires_grad_()
    with torch.enable_grad():
        loss = weights["true"] * moment.true_loss(lambda x, t_B: leaf).mean()
        loss = loss + weights["output"] * squared(leaf, target)
        (expected,) = torch.autograd.grad(loss, leaf)
    came, expected = moment.gradient.double().flatten(), expected.double().flatten()
    scale = (came @ expected) / (expected @ expected).clamp_min(1e-300)
    demand(
        float(scale) > 0, "the output's gradient has the opposite direction of the expected loss's"
    )
    off = relative_error(came, scale * expected)
    most = CLOSE.get(moment.out.dtype, CLOSE_ROUNDED)
    demand(
        off <= most,
        f"the output's gradient differs by {off:.2g} (relative) from that of the expected terms",
    )
    return off

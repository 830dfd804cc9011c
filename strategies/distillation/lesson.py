"""The loss of a student: the true one, the distance to its teacher's prediction, and to its
teacher's hidden states.

Imports torch: import it where torch is there. Shape suffixes: B batch; anything may follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strategies.distillation.hidden import Hidden
from strategies.distillation.teacher import Teacher

__all__ = ["Lesson", "Moment", "relative", "squared"]

Predict = Callable[[Tensor, Tensor], Tensor]
"""(noisy samples, timesteps [B]) -> the model's output."""


def squared(out: Tensor, target: Tensor) -> Tensor:
    """Mean squared error, float32 scalar."""
    return (out.float() - target.float()).square().mean()


def relative(state_B: Tensor, target_B: Tensor) -> Tensor:
    """Squared error of hidden states as a share of the target's square, each sample by itself, so
    that the cut of a batch into micro batches changes nothing; float32 scalar."""
    gap_B = (state_B.float() - target_B.float()).square().flatten(1).mean(1)
    return (gap_B / target_B.float().square().flatten(1).mean(1)).mean()


@dataclass
class Moment:
    """What one micro step of a watched step showed. ``arrived`` is the gradient that came to each
    term of the loss, by its name: its weight in what was differentiated; ``gradient`` what came to
    the student's output."""

    x: Tensor
    t_B: Tensor
    conditions: Mapping[str, Tensor]
    out: Tensor
    true_loss: Callable[[Predict], Tensor]
    states: list[Tensor] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    gradient: Tensor | None = None


@dataclass
class Lesson:
    """What is differentiated in the place of the true loss: the sum of its terms by their
    ``weights`` ("true", "output", "feature"; one of weight 0 is not computed).

    The teacher answers before the student does, so that what it needs meanwhile is gone before
    anything is kept for backward. ``moments`` gets one for each micro step, where somebody asks.
    """

    teacher: Teacher
    heard: Hidden
    weights: Mapping[str, float]
    moments: list[Moment] | None = None

    def __call__(
        self,
        true_loss: Callable[[Predict], Tensor],
        predict: Predict,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """The loss of one micro batch, a scalar (``strategies.engine.Trained.supervise``)."""
        said: list[Any] = []

        def ask(x: Tensor, t_B: Tensor) -> Tensor:
            target, wanted = self.teacher.ask(x, t_B, conditions)
            with self.heard.heard() as states:
                out = predict(x, t_B)
            said.append((x, t_B, out, target, states, wanted))
            return out

        true = true_loss(ask).mean()
        x, t_B, out, target, states, wanted = said.pop()
        terms = {"true": true, **self._terms(out, target, states, wanted)}
        if self.moments is not None:
            moment = Moment(x, t_B, conditions, out.detach(), true_loss)
            moment.states = [state.detach() for state in states]
            self._watch(moment, out, terms)
        return sum(self.weights[name] * term for name, term in terms.items() if self.weights[name])

    def _terms(
        self, out: Tensor, target: Tensor, states: list[Tensor], wanted: list[Tensor]
    ) -> dict[str, Tensor]:
        terms = {}
        if self.weights["output"]:
            terms["output"] = squared(out, target)
        if self.weights["feature"]:
            pairs = zip(states, wanted, strict=True)
            terms["feature"] = torch.stack([relative(*pair) for pair in pairs]).mean()
        return terms

    def _watch(self, moment: Moment, out: Tensor, terms: Mapping[str, Tensor]) -> None:
        moment.values = {name: float(term.detach()) for name, term in terms.items()}

        def came(name: str) -> Callable[[Tensor], None]:
            return lambda gradient: moment.arrived.__setitem__(name, float(gradient))

        for name, term in terms.items():
            term.register_hook(came(name))
        out.register_hook(lambda gradient: setattr(moment, "gradient", gradient.detach().clone()))
        self.moments.append(moment)

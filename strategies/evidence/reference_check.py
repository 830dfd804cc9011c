"""Compare the output of several ranks with that of the whole model on one rank.

The comparison covers what no count shows: the order of heads, the positions of each part, and
whether attention saw all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strategies.base import demand
from strategies.engine import TrainingRun
from strategies.evidence.rules import relative_error

CLOSE = {torch.float32: 1e-5, torch.float64: 1e-5}
"""Type of the output -> largest distance between two computations of it, as a share of its norm.
They sum attention in other shapes."""
CLOSE_ROUNDED = 3e-2
"""The same if products are rounded to 16 bits."""
SEED = 5


def away(trained: TrainingRun, mine: Tensor, wanted: Tensor) -> float:
    """Return the distance of ``mine`` from the whole model's output, as a share of its norm.

    Raises:
        NotInForce: rounding does not explain the distance.
    """
    found, close = relative_error(mine.double(), wanted.double()), close_to(trained, mine.dtype)
    demand(found <= close, f"the output differs from the whole model's by {found:.2g} (relative)")
    return float(f"{found:.2g}")


def close_to(trained: TrainingRun, dtype: torch.dtype) -> float:
    """Return the largest distance that rounding explains between two outputs of type ``dtype``, as
    a share of their norm."""
    rounded = dtype not in CLOSE or "half_compute" in trained.launch.traits
    return CLOSE_ROUNDED if rounded else CLOSE[dtype]


def random_sample(trained: TrainingRun) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return a sample, its timestep and its conditions, equal on all ranks."""
    x, t_B, conditions = trained.subject.example(trained.accelerator.device)
    if x.is_floating_point():
        draw = torch.Generator().manual_seed(SEED)
        x = torch.randn(x.shape, generator=draw).to(x)
    return x, t_B, conditions


def output_of(
    trained: TrainingRun, model: Any, part: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor:
    """Return the output of ``model`` for ``part`` of a random sample."""
    x, t_B, conditions = random_sample(trained)
    x = trained.subject.without_targets(x)
    return trained.subject.predict(model, part(x), t_B, conditions)

"""A rank's part of a prediction beside the same part of one that it makes of the whole sample by
itself: it holds what no count can, the order of heads, the positions of each part, and that
attention saw the others' tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from strategies.base import demand
from strategies.engine import Trained
from strategies.evidence import forward
from strategies.evidence.updates import relative_error
from strategies.parallel.sequence import attending

__all__ = ["as_the_whole", "away", "close_to", "predicted", "random_sample"]

CLOSE = {torch.float32: 1e-5, torch.float64: 1e-5}
"""Type of the output -> how far a part may be from the whole model's, as a share of its norm: sums
of attention are taken over other shapes."""
CLOSE_ROUNDED = 3e-2
"""The same where products are rounded to 16 bits."""
SEED = 5


def as_the_whole(trained: Trained) -> dict[str, Any]:
    """How far the two are apart; every rank takes part.

    Raises:
        NotInForce: further than rounding explains.
    """
    with torch.no_grad(), forward.eager(trained):
        mine = predicted(trained, trained.model, trained.cut)
        with _alone(trained):
            whole = predicted(trained, trained.model, lambda x: x)
    return {"away_from_the_whole": away(trained, mine, trained.cut(whole))}


def away(trained: Trained, mine: Tensor, wanted: Tensor) -> float:
    """How far a prediction of several ranks is from the whole model's, as a share of its norm.

    Raises:
        NotInForce: further than rounding explains.
    """
    found, close = relative_error(mine.double(), wanted.double()), close_to(trained, mine.dtype)
    demand(found <= close, f"its part is {found:.2g} of the norm away from the whole model's")
    return float(f"{found:.2g}")


def close_to(trained: Trained, dtype: torch.dtype) -> float:
    """How far two computations of one output of that type may be apart, as a share of its norm."""
    rounded = dtype not in CLOSE or "half_compute" in trained.launch.traits
    return CLOSE_ROUNDED if rounded else CLOSE[dtype]


def random_sample(trained: Trained) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A sample, its timestep and its conditions, which all ranks draw alike."""
    x, t_B, conditions = trained.subject.example(trained.accelerator.device)
    if x.is_floating_point():
        draw = torch.Generator().manual_seed(SEED)
        x = torch.randn(x.shape, generator=draw).to(x)
    return x, t_B, conditions


def predicted(trained: Trained, model: Any, part: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``model`` makes of ``part`` of a random sample."""
    x, t_B, conditions = random_sample(trained)
    x = trained.subject.without_targets(x)
    return trained.subject.predict(model, part(x), t_B, conditions)


@contextlib.contextmanager
def _alone(trained: Trained) -> Iterator[None]:
    """The model as it is where no rank shares a sample; cut weights are gathered as ever."""
    subject, module, layout = trained.subject, trained.module, trained.launch.layout
    subject.take_part(module, 0, 1)
    try:
        with attending.alone(module, subject):
            yield
    finally:
        part = layout.part(trained.accelerator.process_index)
        subject.take_part(module, part, layout.sequence)

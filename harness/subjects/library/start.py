"""First weights of the library's models: drawn by their names, with all that is computed in place.

The library's classes draw their weights while they are made, in float32, and compute positions by
the way, some of which are no buffers. So a model is made with memory for these alone, and each
weight is drawn where it will live (``strategies.initial``). Weights are normal with a standard
deviation of 0.02, gains one: nothing starts at zero, so that the first steps move every weight.
What these models learn from there is of no interest; memory, speed and parity are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strategies import initial
from strategies.initial import Draw

__all__ = ["draws", "shell"]

SPREAD = 0.02


class _Hollow(TorchFunctionMode):
    """What layers allocate for their weights is made on meta, everything else where it would be."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def shell(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that ``make`` makes, its parameters on meta."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _Hollow():
        module = make()
    initial.replace(module, lambda p: nn.Parameter(p.detach().to("meta"), p.requires_grad))
    return module


def draws(seed: int) -> Draw:
    """Each first weight from ``seed`` and its name: see ``Subject.draws``."""

    def draw(name: str, like: Tensor) -> Tensor:
        if like.ndim == 1 and name.endswith("weight"):
            return torch.ones(like.shape)
        chance = initial.keyed(seed, name)
        return SPREAD * torch.randn(like.shape, generator=chance)

    return draw

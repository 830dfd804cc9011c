"""A model whose loss fails on the host n2, the second node of ``two_nodes``."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


def make() -> tuple[nn.Module, dict[str, Tensor], Callable[..., Tensor]]:
    """Return a linear model, its batch, and the loss."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        real = not isinstance(batch["x"], FakeTensor)  # a plan looks at the loss before any launch
        if real and socket.gethostname() == "n2":
            raise ValueError("no good on n2")
        return model(batch["x"]).square().mean()

    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), {"x": torch.randn(4, 3, 8)}, loss

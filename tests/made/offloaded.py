"""A run of blocks whose kept tensors outweigh its weights; tests on CPUs and on GPUs share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def squares(blocks: Any, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """32 operations, each of which keeps a tensor as large as ``x``."""
    for _ in range(16):
        x = (x * x).tanh()
    return x


def gradient_of(run: Callable[..., torch.Tensor], device: str, elements: int) -> torch.Tensor:
    """Return the gradient of ``elements`` ones on ``device`` through ``run``."""
    x = torch.ones(elements, device=device, requires_grad=True)
    run([torch.nn.Identity()], x, x.detach()).sum().backward()
    return x.grad

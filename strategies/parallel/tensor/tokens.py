"""Stripes of the tokens of samples that all ranks of a group have: cut, put together, and summed.

Shape suffixes: B batch, T tokens, D hidden size. Imports torch: import it only where it is there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Entered", "Left", "all_tokens", "own_tokens", "summed_own"]


def own_tokens(x_BTD: Tensor, group: Any) -> Tensor:
    """This rank's stripe of the tokens; a copy, for a view would keep all of them alive."""
    return x_BTD.chunk(group.size(), 1)[group.rank()].contiguous()


def all_tokens(x_BTD: Tensor, group: Any) -> Tensor:
    """The stripes of all ranks, in their order."""
    batch, *rest = x_BTD.shape
    parts = x_BTD.new_empty(group.size() * batch, *rest)
    dist.all_gather_into_tensor(parts, x_BTD.contiguous(), group=group)
    return parts.unflatten(0, (-1, batch)).movedim(0, 1).flatten(1, 2)


def summed_own(x_BTD: Tensor, group: Any) -> Tensor:
    """The sum of all ranks' ``x``, of this rank's stripe."""
    parts = x_BTD.unflatten(1, (group.size(), -1)).movedim(1, 0).flatten(0, 1)
    mine = torch.empty_like(parts[: len(x_BTD)])
    dist.reduce_scatter_tensor(mine, parts, group=group)
    return mine


class Entered(torch.autograd.Function):
    """Whole samples, which all ranks have alike -> own tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return own_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return all_tokens(grad, ctx.group), None


class Left(torch.autograd.Function):
    """Own tokens -> whole samples, with which all ranks go on alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return all_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return own_tokens(grad, ctx.group), None

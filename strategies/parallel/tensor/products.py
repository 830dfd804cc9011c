"""Linear layers of which each rank of a group computes a part: by columns of the product, then by
rows of the next one's weight, so that only their sum is exchanged.

Source: Shoeybi et al. 2019, Megatron-LM (arXiv:1909.08053), whose f and g are ``Spread`` and
``Summed``.

Imports torch: import it only where it is there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from strategies import initial
from strategies.parallel.tensor.shares import held

__all__ = ["KINDS", "Columns", "Cut", "Rows", "Spread", "cut_block", "layers"]


class Spread(torch.autograd.Function):
    """``x`` as it is, which all ranks of the group have; backward sums their gradients of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # In place: the product's own gradient of its input, which nobody else is given.
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Summed(torch.autograd.Function):
    """The sum of all ranks' ``x``, in its place; backward hands on the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


class Cut(nn.Linear):
    """A linear layer that holds a part of ``whole``: the ``index``-th of so many ``parts``.

    ``in_features`` and ``out_features`` are those of the part; ``group`` are the ranks that have
    the other parts, from ``configure`` on.
    """

    def __init__(self, whole: nn.Linear, index: int, parts: int, axis: int, packed: int) -> None:
        weight = held(whole.weight, axis, index, parts, packed)
        with initial.valueless():
            super().__init__(weight.shape[1], weight.shape[0], bias=False)
        self.weight, self.bias = weight, whole.bias
        self.group: Any = None


class Columns(Cut):
    """[..., K] -> [..., F / P], of the F features of the product those of this rank; of ``packed``
    products that lie behind one another, of each."""

    def __init__(self, whole: nn.Linear, index: int, parts: int, packed: int = 1) -> None:
        super().__init__(whole, index, parts, 0, packed)
        if self.bias is not None:
            self.bias = held(self.bias, 0, index, parts, packed)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Spread.apply(x, self.group), self.weight, self.bias)


class Rows(Cut):
    """[..., K / P] -> [..., F]: the product of this rank's part of the input, summed over all."""

    def __init__(self, whole: nn.Linear, index: int, parts: int) -> None:
        super().__init__(whole, index, parts, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = Summed.apply(F.linear(x, self.weight), self.group)
        # Once: each rank's product with it would be as many biases as ranks.
        return out if self.bias is None else out.add_(self.bias.to(out.dtype))


PACKED = 3
"""Queries, keys and values, which ``qkv`` makes in one product."""


KINDS = (Columns, Rows)
"""What takes the place of the layer that begins a half of a block, and of the one that ends it."""


def cut_block(
    block: Any, index: int, parts: int, kinds: tuple[type[Columns], type[Rows]] = KINDS
) -> None:
    """Have a block of the part "halves" hold and compute the ``index``-th of so many ``parts``:
    whole heads, and as many of the MLP's inner features; norms and modulation stay whole."""
    (first, last), attn, mlp = kinds, block.attn, block.mlp
    attn.qkv = first(attn.qkv, index, parts, PACKED)
    attn.proj = last(attn.proj, index, parts)
    attn.num_heads //= parts
    mlp.fc1 = first(mlp.fc1, index, parts)
    mlp.fc2 = last(mlp.fc2, index, parts)


def layers(module: nn.Module) -> list[Cut]:
    """All that are cut."""
    return [layer for layer in module.modules() if isinstance(layer, Cut)]

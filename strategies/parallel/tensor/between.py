"""Between the products that ranks share, each has some of the tokens alone: norms, modulation and
what is added up are of these, and cut layers gather all tokens before they multiply and leave each
rank the sum of its own.

Source: Korthikanti et al. 2022, Reducing Activation Recomputation (arXiv:2205.05198), whose g and
g-bar are ``Gathered`` and ``Scattered``.

Imports torch: import it only where it is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strategies.activations.runners import surround
from strategies.parallel.tensor.products import Columns, Rows, Spread
from strategies.parallel.tensor.tokens import Entered, Left, all_tokens, summed_own
from strategies.subject import Subject

__all__ = ["KINDS", "connect", "has_own"]


class Gathered(torch.autograd.Function):
    """The product of all tokens, kept for backward as this rank's own: gathered again there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Any) -> Tensor:
        ctx.group, ctx.biased = group, bias is not None
        ctx.save_for_backward(x, weight)
        return F.linear(all_tokens(x, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        of_input = summed_own(grad @ weight, ctx.group)
        rows = grad.flatten(0, 1)
        of_weight = rows.T @ all_tokens(x, ctx.group).flatten(0, 1)
        return of_input, of_weight, rows.sum(0) if ctx.biased else None, None


class Scattered(torch.autograd.Function):
    """The sum of all ranks' products, of own tokens, and the bias. Its gradient is of all tokens,
    which backward gathers anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, group: Any) -> Tensor:
        ctx.group, ctx.biased = group, bias is not None
        out = summed_own(x, group)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad = all_tokens(grad, ctx.group)
        return grad, grad.flatten(0, 1).sum(0) if ctx.biased else None, None


class GatheredColumns(Columns):
    """[B, T / P, K] -> [B, T, F / P]."""

    def forward(self, x: Tensor) -> Tensor:
        # What runs in a Function is not seen by autocast. A prediction's GPU is of no device type.
        kind = "cpu" if x.device.type == "cpu" else "cuda"
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return Gathered.apply(x.to(dtype), self.weight.to(dtype), bias, self.group)


class ScatteredRows(Rows):
    """[B, T, K / P] -> [B, T / P, F]."""

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight)
        bias = None if self.bias is None else self.bias.to(out.dtype)
        return Scattered.apply(out, bias, self.group)


KINDS = (GatheredColumns, ScatteredRows)
"""As ``products.KINDS``."""


class OwnTokens:
    """Runs the blocks on this rank's tokens of what it is given, by ``inner``."""

    def __init__(self, inner: Any, group: Any) -> None:
        self.inner, self.group = inner, group

    def __call__(self, blocks: Any, x_BTD: Tensor, *given: Any, **named: Any) -> Tensor:
        own = Entered.apply(x_BTD, self.group)
        return Left.apply(self.inner(blocks, own, *given, **named), self.group)


def connect(module: nn.Module, subject: Subject, group: Any) -> None:
    """Have the blocks of ``module``, whose layers are cut, run on own tokens from now on; called
    when all that recomputes them is in place, so that it keeps own tokens too."""
    surround(module, subject, lambda inner: OwnTokens(inner, group))
    for block in subject.blocks(module):
        # Shift, scale and gate are of all tokens, and each rank's gradient of them is of its own.
        block.adaLN_modulation.register_forward_hook(lambda layer, given, out: spread(out, group))


def has_own(block: Any) -> bool:
    """Whether ``block`` is given this rank's tokens alone."""
    return isinstance(block.attn.qkv, GatheredColumns)


def spread(out: Tensor, group: Any) -> Tensor:
    """What a block makes of the condition; backward sums the gradients of all ranks' tokens."""
    return Spread.apply(out, group)

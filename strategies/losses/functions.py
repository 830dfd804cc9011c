"""Cross entropy of a linear layer over a vocabulary, in four implementations.

Each takes hidden states [N, D], the layer's weight [V, D] and bias [V], and targets int64 [N]. It
returns the sum over the targets that are not ``IGNORED``. Imports torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from strategies.precision.autocast import autocast_dtype

IGNORED = -100
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def full(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """Compute the loss with all logits at once, and keep their logarithms for backward (torch's two
    steps)."""
    logits_NV = F.linear(x_ND, weight_VD, bias_V).float()
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")


@functools.cache
def chunked(chunks: int) -> Function:
    """Return ``full`` over ``chunks`` chunks of tokens in turn, each recomputed in backward."""

    def run(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
        total = x_ND.new_zeros((), dtype=torch.float32)
        for x, targets in zip(x_ND.chunk(chunks), targets_N.chunk(chunks), strict=True):
            options = {"use_reentrant": False, "preserve_rng_state": False}
            total = total + checkpoint(full, x, weight_VD, bias_V, targets, **options)
        return total

    return run


def fused(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """Compute torch's fused linear cross entropy: it makes gradients in forward, chunk by chunk."""
    x, weight, bias = _alike(x_ND, weight_VD, bias_V)
    return F.linear_cross_entropy(
        x, weight, targets_N, linear_bias=bias, reduction="sum", ignore_index=IGNORED,
        options=torch.nn.LinearCrossEntropyOptions(),
    )  # fmt: skip


def cut(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """Compute the loss by Wijmans et al.'s kernels: logits exist only in a GPU's registers and
    caches."""
    from cut_cross_entropy import linear_cross_entropy

    x, weight, bias = _alike(x_ND, weight_VD, bias_V)
    given = {"ignore_index": IGNORED, "reduction": "sum"}
    return linear_cross_entropy(x, weight, targets_N, bias=bias, **given)


def _alike(*tensors: Tensor) -> list[Tensor]:
    """Return the operands in one type, for functions that autocast does not cover."""
    dtype = autocast_dtype(tensors[0])
    return [t.to(dtype or t.dtype) for t in tensors]

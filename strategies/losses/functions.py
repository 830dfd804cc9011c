"""Cross entropy of a linear layer over a vocabulary, each way with other parts of the logits.

Each takes hidden states [N, D], the layer's weight [V, D] and bias [V], and targets int64 [N], of
which those that are ``IGNORED`` count for nothing, and gives the sum over the others.

Imports torch: import it only where it is there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from strategies.precision.autocast import autocast_dtype

__all__ = ["IGNORED", "Function", "chunked", "cut", "full", "fused"]

IGNORED = -100
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def full(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """All logits at once, and their logarithms for backward: torch's own two steps."""
    logits_NV = F.linear(x_ND, weight_VD, bias_V).float()
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")


def chunked(chunks: int) -> Function:
    """``full`` of a share of the tokens after the other, each computed again in backward."""

    def run(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
        total = x_ND.new_zeros((), dtype=torch.float32)
        for x, targets in zip(x_ND.chunk(chunks), targets_N.chunk(chunks), strict=True):
            options = {"use_reentrant": False, "preserve_rng_state": False}
            total = total + checkpoint(full, x, weight_VD, bias_V, targets, **options)
        return total

    return run


def fused(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """torch's fused linear cross entropy: gradients are made in forward, piece by piece."""
    x, weight, bias = _alike(x_ND, weight_VD, bias_V)
    return F.linear_cross_entropy(
        x, weight, targets_N, linear_bias=bias, reduction="sum", ignore_index=IGNORED,
        options=torch.nn.LinearCrossEntropyOptions(),
    )  # fmt: skip


def cut(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """Wijmans et al.'s kernels: logits live in a GPU's registers and caches alone."""
    from cut_cross_entropy import linear_cross_entropy

    x, weight, bias = _alike(x_ND, weight_VD, bias_V)
    given = {"ignore_index": IGNORED, "reduction": "sum"}
    return linear_cross_entropy(x, weight, targets_N, bias=bias, **given)


def _alike(*tensors: Tensor) -> list[Tensor]:
    """The operands in one type, for functions that autocast does not know."""
    dtype = autocast_dtype(tensors[0])
    return [t.to(dtype or t.dtype) for t in tensors]

"""Cross entropy of a linear layer over a vocabulary, in four implementations.

Each takes hidden states [N, D], the layer's weight [V, D] and bias [V], and targets int64 [N]. It
returns the sum over the targets that are not ``IGNORED``. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from strategies.evidence.readings import wrapped
from strategies.precision.autocast import autocast_dtype

IGNORED = -100
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def full(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """Compute the loss with all logits at once, and keep their logarithms for backward (torch's two
    steps)."""
    logits_NV = F.linear(x_ND, weight_VD, bias_V).float()
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")


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


# ---- logits of a watched step ----


OF_LOGITS = ("aten::_log_softmax", "aten::_log_softmax_backward_data")
"""Operators that only a loss runs; products as wide as the vocabulary may be of any layer."""
FUSED = "linear_cross_entropy_batch_chunked"


@contextmanager
def logits(layer: Any) -> Iterator[dict[str, int]]:
    """Record the logits of a watched step.

    ``rows``: the most of one tensor, and its ``bytes``. ``again``: how often they were computed
    within backward. ``tokens``: those of a call. ``fused``: calls of torch's fused operator.
    """
    seen = dict.fromkeys(("rows", "bytes", "again", "tokens", "fused"), 0)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if wrapped(types):
                return NotImplemented
            out = f(*args, **(kwargs or {}))
            name = f.overloadpacket._qualified_op_name
            seen["fused"] += FUSED in name
            if name in OF_LOGITS and out.shape[-1] == layer.out_features:
                seen["rows"] = max(seen["rows"], out.shape[0])
                seen["bytes"] = max(seen["bytes"], out.nbytes)
                inside = torch._C._current_graph_task_id() != -1
                seen["again"] += inside and name == "aten::_log_softmax"
            return out

    def called(_: Any, given: Any) -> None:
        seen["tokens"] = max(seen["tokens"], given[0].shape[:-1].numel())

    handle = layer.register_forward_pre_hook(called)
    try:
        with Watch():
            yield seen
    finally:
        handle.remove()

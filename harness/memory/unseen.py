"""Memory of an operation that shows nothing of its inside: written in Python, but run as one."""

from __future__ import annotations

from typing import Any

__all__ = ["scratch"]

FUSED_LOSS = "linear_cross_entropy_batch_chunked"


def scratch(func: Any, args: Any) -> int:
    """Bytes that ``func`` holds while it runs and that no operation of it tells: of torch's fused
    linear cross entropy the logits of one piece of the tokens.

    Source: torch 2.13, torch/nn/modules/linear_cross_entropy.py (``logits_buf``).
    """
    if FUSED_LOSS not in str(func) or len(args) < 11:
        return 0
    weight, rows, kind = args[1], args[8], args[10]
    return rows * weight.shape[0] * kind.itemsize

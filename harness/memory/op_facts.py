"""Facts about single ops: ops that start no kernel, and memory that an op hides."""

from __future__ import annotations

from typing import Any

# Views that are none by their schema: the input is not used again, or is modified itself.
VIEWS = frozenset({
    *("_unsafe_view", "detach_", "squeeze_", "unsqueeze_", "t_", "transpose_", "as_strided_"),
    *("set_", "lift"),
})  # fmt: skip
ALLOCATIONS = frozenset({
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    *("resize_", "resize_as_"),
})  # fmt: skip
BOOKKEEPING = frozenset({"record_stream"})
FREE = VIEWS | ALLOCATIONS | BOOKKEEPING


def is_free(func: Any) -> bool:
    """Return whether ``func``, an op in a dispatch mode, is a view, an allocation or an
    annotation."""
    if func.namespace != "aten":
        return False
    return getattr(func, "is_view", False) or func._schema.name.removeprefix("aten::") in FREE


# ---- hidden workspace ----
# Some operations are written in Python but dispatched as one, so a trace misses their allocations.


FUSED_LOSS = "linear_cross_entropy_batch_chunked"
FOUR_BITS = "bitsandbytes.gemm_4bit"
FUSED_ROWS = 4
"""Rows up to which every GPU multiplies by the quantized codes directly."""


def scratch(func: Any, args: Any) -> int:
    """Return the bytes that ``func`` holds while it runs and that no traced operation shows.

    For torch's fused linear cross entropy they are the logits of one chunk of tokens. For
    bitsandbytes' product they are the dequantized weight, its scales and the output.

    Source: torch 2.13, torch/nn/modules/linear_cross_entropy.py (``logits_buf``); bitsandbytes
    0.50, backends/default/ops.py (``_gemm_4bit_default_impl``) and backends/cuda/ops.py
    (``_gemm_4bit_use_custom_cuda``, ``_dequant_linear_fallback``).
    """
    name = str(func)
    if FUSED_LOSS in name and len(args) >= 11:
        weight, rows, kind = args[1], args[8], args[10]
        return rows * weight.shape[0] * kind.itemsize
    if FOUR_BITS not in name:
        return 0
    given, codes, (out, width), _, block = args[:5]
    rows, scales = given.numel() // width, -(-out * width // block)
    on_gpu = codes.device.type != "cpu"
    if on_gpu and rows <= FUSED_ROWS and width % block == 0:
        return 0
    # A GPU's fallback keeps the scales before and after their offset is added. Up to 1536 rows a
    # table in the library decides per GPU whether it is used; the larger amount is counted.
    times = 2 if on_gpu else 1
    return (out * width + rows * out) * given.dtype.itemsize + 4 * times * scales

"""Which of torch's ops start no kernel: they make views or allocate, and move no bytes."""

from __future__ import annotations

from typing import Any

# Views that the schema does not call so: the input is never used again, or is changed itself.
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
    """Whether ``func``, an op as a dispatch mode sees it, is a view, an allocation or a note."""
    if func.namespace != "aten":
        return False
    return getattr(func, "is_view", False) or func._schema.name.removeprefix("aten::") in FREE


# ---- unseen ----
# Memory of an operation that shows nothing of its inside: written in Python, but run as one.


FUSED_LOSS = "linear_cross_entropy_batch_chunked"
FOUR_BITS = "bitsandbytes.gemm_4bit"
FUSED_ROWS = 4
"""Up to which every GPU multiplies by the codes themselves."""


def scratch(func: Any, args: Any) -> int:
    """Bytes that ``func`` holds while it runs and that no operation of it tells: of torch's fused
    linear cross entropy the logits of one piece of the tokens; of bitsandbytes' product the weight
    turned back, its scales and the output.

    Source: torch 2.13, torch/nn/modules/linear_cross_entropy.py (``logits_buf``); bitsandbytes
    0.50, backends/default/ops.py (``_gemm_4bit_default_impl``) and backends/cuda/ops.py
    (``_gemm_4bit_use_custom_cuda``, ``_dequant_linear_fallback``).
    """
    name = str(func)
    if FOUR_BITS in name:
        return _turned_back(*args[:5])
    if FUSED_LOSS not in name or len(args) < 11:
        return 0
    weight, rows, kind = args[1], args[8], args[10]
    return rows * weight.shape[0] * kind.itemsize


def _turned_back(given: Any, codes: Any, shape: Any, absmax: Any, block: int) -> int:
    out, width = shape
    rows, scales = given.numel() // width, -(-out * width // block)
    on_gpu = codes.device.type != "cpu"
    if on_gpu and rows <= FUSED_ROWS and width % block == 0:
        return 0
    # A GPU's fallback keeps the scales before and behind their offset. Up to 1536 rows a card may
    # do without, by a table of its own: what may be needed is counted.
    times = 2 if on_gpu else 1
    return (out * width + rows * out) * given.dtype.itemsize + 4 * times * scales

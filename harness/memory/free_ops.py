"""Which of torch's ops start no kernel: they make views or allocate, and move no bytes."""

from __future__ import annotations

from typing import Any

__all__ = ["is_free"]

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

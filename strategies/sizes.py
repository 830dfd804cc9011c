"""What the sizes of an engine's buffers follow from, and what an allocator makes of a size."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Sizes", "pinned_block"]


class Sizes(NamedTuple):
    """What sizes of buffers follow from, in elements: of all trained parameters, of the largest
    block, of the largest parameter and of the largest one-dimensional one; ``weights`` of each
    trained parameter that is no bias, where they are known before the model is built."""

    total: int
    block: int
    tensor: int
    bias: int
    weights: tuple[int, ...] = ()


def pinned_block(size: int) -> int:
    """Bytes of pinned host memory that torch takes for ``size`` bytes: the next power of two.

    Source: torch 2.13, ATen/core/CachingHostAllocator.h (allocate), with the default settings.
    """
    return 1 << (size - 1).bit_length() if size else 0

"""What the sizes of an engine's buffers follow from."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Sizes"]


class Sizes(NamedTuple):
    """What sizes of buffers follow from, in elements: of all trained parameters, of the largest
    block, of the largest parameter and of the largest one-dimensional one; ``weights`` of each
    trained parameter that is no bias, where they are known before the model is built. ``here``: the
    trained elements of a model that stands for a deeper one, whose total is ``total``; else 0."""

    total: int
    block: int
    tensor: int
    bias: int
    weights: tuple[int, ...] = ()
    here: int = 0

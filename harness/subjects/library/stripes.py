"""A rank's part of a sample in the library's classes: which one, and the positions of its tokens.

Where a class is given positions with its tokens, those of the part are given. A video's are made
inside, from the size of what came in: there they are made of the whole size, and cut.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["mine", "take_part"]

PART = "part_of_samples"
ROTARY = "rope"
"""The module of a video's class that makes positions, (cosines, sines) of [1, F H W, 1, K]."""


def mine(model: Any, tokens: Tensor, axis: int = 0) -> Tensor:
    """This rank's part of something along the axis of its tokens, as ``take_part`` said."""
    part, parts = getattr(getattr(model, "module", model), PART, (0, 1))
    return tokens if parts == 1 else tokens.chunk(parts, dim=axis)[part]


def take_part(module: nn.Module, part: int, parts: int) -> None:
    """Have the bare ``module`` take the ``part``-th of so many equal parts from now on."""
    known = hasattr(module, PART)
    setattr(module, PART, (part, parts))
    if not known and hasattr(module, ROTARY):
        _positions_of_the_part(module)


def _positions_of_the_part(module: nn.Module) -> None:
    rotary = getattr(module, ROTARY)

    def whole(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """In the place of the part, something of the whole's shape: no more is asked of it."""
        x, parts = given[0], getattr(module, PART)[1]
        shape = list(x.shape)
        shape[3] *= parts
        return (x.new_empty(1).expand(shape), *given[1:])

    def cut(_: Any, given: tuple[Tensor, ...], made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        frames = given[0].shape[2] // rotary.patch_size[0]
        rows = given[0].shape[3] // rotary.patch_size[1]
        return tuple(_stripe(table, frames, rows, *getattr(module, PART)) for table in made)

    rotary.register_forward_pre_hook(whole)
    rotary.register_forward_hook(cut)


def _stripe(table: Tensor, frames: int, rows: int, part: int, parts: int) -> Tensor:
    """[1, F H W, 1, K] -> the same of a stripe of rows of each frame."""
    if parts == 1:
        return table
    of_rows = table.unflatten(1, (frames, rows, -1)).chunk(parts, dim=2)[part]
    return of_rows.flatten(1, 3)

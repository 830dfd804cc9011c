"""A rank's part of a sample in the library's classes: which one, and the positions of its tokens.

Where a class is given positions with its tokens, those of the part are given. What it makes inside
from the size of what came in is made of the whole size, and cut.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["mine", "rows_of", "take_part"]

PART = "part_of_samples"
ROTARY = "rope"
"""The module that makes a video's positions, (cosines, sines): [1, F H W, 1, K] from the size of
what came in, or [B, F H W, K] from sizes that it is told."""
EMBED = "pos_embed"
"""The module that makes an image's tokens [B, T, D], with positions, of latents [B, C, H, W]."""


def mine(model: Any, tokens: Tensor, axis: int = 0) -> Tensor:
    """This rank's part of something along the axis of its tokens, as ``take_part`` said."""
    part, parts = _part(model)
    return tokens if parts == 1 else tokens.chunk(parts, dim=axis)[part]


def rows_of(model: Any, table: Tensor, axis: int, frames: int, rows: int) -> Tensor:
    """The same of a stripe of rows of each frame, where ``axis`` has the tokens of all frames, of
    so many rows each."""
    part, parts = _part(model)
    if parts == 1:
        return table
    of_rows = table.unflatten(axis, (frames, rows, -1)).chunk(parts, dim=axis + 1)[part]
    return of_rows.flatten(axis, axis + 2)


def take_part(module: nn.Module, part: int, parts: int, stripes: str) -> None:
    """Have the bare ``module`` take the ``part``-th of so many equal parts from now on, which are
    ``stripes`` of what ``Family.stripes`` says."""
    known = hasattr(module, PART)
    setattr(module, PART, (part, parts))
    if known:
        return
    if hasattr(module, ROTARY):
        _of_rows(module) if stripes == "height" else _of_tokens(module)
    elif stripes == "height" and hasattr(module, EMBED):
        _of_an_image(module)


def _part(model: Any) -> tuple[int, int]:
    return getattr(getattr(model, "module", model), PART, (0, 1))


def _of_rows(module: nn.Module) -> None:
    rotary = getattr(module, ROTARY)

    def whole(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """In the place of the part, something of the whole's shape: no more is asked of it."""
        x, parts = given[0], _part(module)[1]
        shape = list(x.shape)
        shape[3] *= parts
        return (x.new_empty(1).expand(shape), *given[1:])

    def cut(_: Any, given: tuple[Tensor, ...], made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        frames = given[0].shape[2] // rotary.patch_size[0]
        rows = given[0].shape[3] // rotary.patch_size[1]
        return tuple(rows_of(module, table, 1, frames, rows) for table in made)

    rotary.register_forward_pre_hook(whole)
    rotary.register_forward_hook(cut)


def _of_tokens(module: nn.Module) -> None:
    def cut(_: Any, given: tuple[Any, ...], made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(mine(module, table, 1) for table in made)

    getattr(module, ROTARY).register_forward_hook(cut)


def _of_an_image(module: nn.Module) -> None:
    """Its positions are added where its tokens are made, so tokens are made of the part in its
    place among zeros, and the others are left out: what one layer costs once more for each."""

    def placed(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,), (part, parts) = given, _part(module)
        rows = x.shape[2]
        return (F.pad(x, (0, 0, part * rows, (parts - 1 - part) * rows)),)

    embed = getattr(module, EMBED)
    embed.register_forward_pre_hook(placed)
    embed.register_forward_hook(lambda _, given, made: mine(module, made, 1))

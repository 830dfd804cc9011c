"""Tensors as one bit an element and one size a row. Imports torch: import it where torch is."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack", "unpack"]

BITS = (1, 2, 4, 8, 16, 32, 64, 128)


def rows(tensor: Tensor) -> Tensor:
    """A tensor as a matrix: a row an output of a layer, one row for a bias."""
    return tensor.reshape(len(tensor), -1) if tensor.ndim > 1 else tensor.reshape(1, -1)


def pack(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Signs, eight to a byte, and the mean size of each row.

    One size for a whole table would move the rows of labels that were never seen.
    """
    positive = (tensor.reshape(-1) >= 0).to(torch.uint8)
    padded = torch.nn.functional.pad(positive, (0, -len(positive) % 8)).view(-1, 8)
    weights = torch.tensor(BITS, dtype=torch.uint8, device=tensor.device)
    return (padded * weights).sum(dim=1, dtype=torch.uint8), rows(tensor).abs().mean(dim=1)


def unpack(signs: Tensor, sizes: Tensor, shape: torch.Size) -> Tensor:
    """What ``pack`` kept of a tensor of ``shape``."""
    weights = torch.tensor(BITS, dtype=torch.uint8, device=signs.device)
    bits = (signs[:, None] & weights).ne(0).reshape(-1)[: shape.numel()]
    whole = (bits.float() * 2 - 1).view(len(sizes), -1) * sizes[:, None]
    return whole.view(shape)

"""k-means in one dimension, over sorted values: exact sums of any run of them are at hand.

Imports torch: import it where torch is there. Shape suffixes: G rows that are clustered apart, N
values of each, K clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["palettes"]

ROUNDS = 100
"""Of Lloyd's algorithm: each takes K searches in sorted values, so they cost next to nothing."""


def palettes(values_GN: Tensor, bits: int) -> Tensor:
    """2 ** ``bits`` values for each row, by k-means (Lloyd 1982): [G, K] float32, ascending.

    From two starts, of which the better counts: groups of as many values each, and entries as dense
    as the cube root of the values' density, which is best for many entries (Panter and Dite 1951).
    An entry that no value is nearest to stays where it was.
    """
    ordered = values_GN.float().sort(dim=1).values
    sums = F.pad(ordered.double().cumsum(dim=1), (1, 0))
    shares = (torch.ones_like(ordered[:, 1:]), _cube_root(ordered))
    ends = [_lloyd(ordered, sums, _spread(ordered, share, 2**bits)) for share in shares]
    gains = [_explained(ordered, sums, centres) for centres in ends]
    return torch.where((gains[1] > gains[0])[:, None], ends[1], ends[0]).float()


def _cube_root(ordered: Tensor) -> Tensor:
    """The share of entries between each two neighbours: the cube root of one value in a gap, times
    the gap."""
    return ordered.diff(dim=1) ** (2 / 3)


def _spread(ordered: Tensor, share: Tensor, size: int) -> Tensor:
    """``size`` of the values, with as much of ``share`` [G, N - 1] between each two: [G, K]."""
    sums = F.pad(share.double().cumsum(dim=1), (1, 0))
    middles = (torch.arange(size, device=ordered.device, dtype=torch.float64) + 0.5) / size
    places = torch.searchsorted(sums, (middles * sums[:, -1:]).contiguous())
    return ordered.gather(1, places.clamp(max=ordered.shape[1] - 1)).double()


def _lloyd(ordered: Tensor, sums: Tensor, centres: Tensor) -> Tensor:
    for _ in range(ROUNDS):
        totals, counts = _groups(ordered, sums, centres)
        centres = torch.where(counts > 0, totals / counts.clamp(min=1), centres)
    return centres


def _groups(ordered: Tensor, sums: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and number of the values nearest to each centre, both [G, K]."""
    edges = ((centres[:, 1:] + centres[:, :-1]) / 2).to(ordered.dtype).contiguous()
    ends = F.pad(torch.searchsorted(ordered, edges), (1, 0))
    ends = F.pad(ends, (0, 1), value=ordered.shape[1])
    return sums.gather(1, ends).diff(dim=1), ends.diff(dim=1)


def _explained(ordered: Tensor, sums: Tensor, centres: Tensor) -> Tensor:
    """What the groups explain of the values' squares, [G]: the more, the less is left."""
    totals, counts = _groups(ordered, sums, centres)
    return (totals.square() / counts.clamp(min=1)).sum(dim=1)

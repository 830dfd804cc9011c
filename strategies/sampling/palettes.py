"""Linear layers with weights as packed indices into small palettes, chosen by k-means.

torchao 0.18 has codebooks as prototypes, which take a byte for each index of any size; coremltools
packs for Core ML only. This is our own: indices of ``bits`` bits, eight in ``bits`` bytes.

Imports torch. Shape suffixes: G palettes (rows clustered separately), N values of each, K entries
of a palette, M groups of eight indices.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strategies import initial

# ---- one-dimensional k-means ----
# Values are sorted, so the sum of any run of them is a difference of prefix sums.


ROUNDS = 100
"""Iterations of Lloyd's algorithm: each takes K searches in sorted values, so they cost little."""


def palettes(values_GN: Tensor, bits: int) -> Tensor:
    """Return 2 ** ``bits`` values for each row, by k-means (Lloyd 1982): [G, K] float32, ascending.

    The better of two starts is taken: groups of equal size, and entries as dense as the cube root
    of the values' density. The latter is best for many entries (Panter and Dite 1951). An entry
    that is nearest to no value stays unchanged.
    """
    ordered = values_GN.float().sort(dim=1).values
    sums = F.pad(ordered.double().cumsum(dim=1), (1, 0))
    # The cube root of the density between neighbors is that of one value in a gap, times the gap.
    shares = (torch.ones_like(ordered[:, 1:]), ordered.diff(dim=1) ** (2 / 3))
    ends = [_lloyd(ordered, sums, _spread(ordered, share, 2**bits)) for share in shares]
    gains = []
    for centres in ends:  # the part of the values' squares that the groups explain
        totals, counts = _groups(ordered, sums, centres)
        gains.append((totals.square() / counts.clamp(min=1)).sum(dim=1))
    return torch.where((gains[1] > gains[0])[:, None], ends[1], ends[0]).float()


def _spread(ordered: Tensor, share: Tensor, size: int) -> Tensor:
    """Return ``size`` of the values, with equal ``share`` [G, N - 1] between each two: [G, K]."""
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
    """Return sum and number of the values nearest to each center, both [G, K]."""
    edges = ((centres[:, 1:] + centres[:, :-1]) / 2).to(ordered.dtype).contiguous()
    ends = F.pad(torch.searchsorted(ordered, edges), (1, 0))
    ends = F.pad(ends, (0, 1), value=ordered.shape[1])
    return sums.gather(1, ends).diff(dim=1), ends.diff(dim=1)


def indices_of(values_GN: Tensor, palettes_GK: Tensor) -> Tensor:
    """Return the index of the entry nearest to each value: uint8 [G, N]."""
    edges = ((palettes_GK[:, 1:] + palettes_GK[:, :-1]) / 2).contiguous()
    found = torch.searchsorted(edges, values_GN.float().contiguous(), out_int32=True)
    return found.to(torch.uint8)


def pack(indices: Tensor, bits: int) -> Tensor:
    """Return uint8 indices, flattened, in ``bits`` bits each: uint8 [ceil(count / 8) * bits]."""
    flat = indices.flatten()
    groups_M8 = F.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    packed = torch.zeros(len(groups_M8), bits, dtype=torch.uint8, device=flat.device)
    for place in range(8):
        at, shift = divmod(place * bits, 8)
        packed[:, at] |= groups_M8[:, place] << shift
        if shift + bits > 8:
            packed[:, at + 1] |= groups_M8[:, place] >> (8 - shift)
    return packed.flatten()


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the first ``count`` indices: uint8 [count]."""
    groups = packed.view(-1, bits)
    indices = torch.empty(len(groups), 8, dtype=torch.uint8, device=packed.device)
    for place in range(8):
        at, shift = divmod(place * bits, 8)
        value = groups[:, at] >> shift
        if shift + bits > 8:
            value = value | (groups[:, at + 1] << (8 - shift))
        indices[:, place] = value & (2**bits - 1)
    return indices.flatten()[:count]


class PaletteLinear(nn.Module):
    """Linear layer whose weight is ``codes`` (packed indices) and ``palette`` [G, K].

    Each ``rows`` rows of the weight have a palette (0: one for all). The weight is decoded for each
    product.
    """

    def __init__(self, linear: nn.Linear, bits: int, rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bits, self.palettes = bits, linear.out_features // (rows or linear.out_features)
        self.bias = linear.bias
        self.codes = initial.kept(linear.weight, self.take)

    def take(self, weight: Tensor) -> nn.Parameter:
        """Choose and store the palettes of ``weight``, and return its codes."""
        values_GN = weight.detach().reshape(self.palettes, -1)
        chosen = palettes(values_GN, self.bits)
        self.register_buffer("palette", chosen.to(weight.dtype))
        codes = pack(indices_of(values_GN, chosen), self.bits)
        return nn.Parameter(codes, requires_grad=False)

    def whole(self) -> Tensor:
        """Return the weight [out, in]."""
        count = self.out_features * self.in_features
        indices = unpack(self.codes, self.bits, count).int().view(self.palettes, -1)
        if self.palettes > 1:
            first = torch.arange(self.palettes, dtype=torch.int32, device=indices.device)
            indices = indices + (first << self.bits)[:, None]
        values = self.palette.flatten().index_select(0, indices.flatten())
        return values.view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.whole(), self.bias)

"""Weights as indices into a small palette of values, packed to the bit.

torchao 0.18 has codebooks as prototypes, which keep a byte for each index, whatever its bits;
coremltools packs for Core ML alone. So this is our own: palettes by ``kmeans``, and indices of
``bits`` bits, eight in ``bits`` bytes.

Imports torch: import it where torch is there. Shape suffixes: G palettes, N values of each, K
entries of a palette, M groups of eight indices.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strategies import initial
from strategies.sampling.kmeans import palettes

__all__ = ["PaletteLinear", "indices_of", "pack", "palettize", "unpack"]

TOGETHER = 8


def indices_of(values_GN: Tensor, palettes_GK: Tensor) -> Tensor:
    """The entry nearest to each value: uint8 [G, N]."""
    edges = ((palettes_GK[:, 1:] + palettes_GK[:, :-1]) / 2).contiguous()
    found = torch.searchsorted(edges, values_GN.float().contiguous(), out_int32=True)
    return found.to(torch.uint8)


def pack(indices: Tensor, bits: int) -> Tensor:
    """uint8 indices, flattened, in ``bits`` bits each: uint8 [ceil(count / 8) * bits]."""
    flat = indices.flatten()
    groups_M8 = F.pad(flat, (0, -len(flat) % TOGETHER)).view(-1, TOGETHER)
    packed = torch.zeros(len(groups_M8), bits, dtype=torch.uint8, device=flat.device)
    for place in range(TOGETHER):
        at, shift = divmod(place * bits, 8)
        packed[:, at] |= groups_M8[:, place] << shift
        if shift + bits > 8:
            packed[:, at + 1] |= groups_M8[:, place] >> (8 - shift)
    return packed.flatten()


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` indices: uint8 [count]."""
    groups = packed.view(-1, bits)
    indices = torch.empty(len(groups), TOGETHER, dtype=torch.uint8, device=packed.device)
    for place in range(TOGETHER):
        at, shift = divmod(place * bits, 8)
        value = groups[:, at] >> shift
        if shift + bits > 8:
            value = value | (groups[:, at + 1] << (8 - shift))
        indices[:, place] = value & (2**bits - 1)
    return indices.flatten()[:count]


class PaletteLinear(nn.Module):
    """A linear layer whose weight is ``codes`` (packed indices) and ``palette`` [G, K], a palette
    for each ``rows`` rows of the weight (0: one for all); put together for each product."""

    def __init__(self, linear: nn.Linear, bits: int, rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bits, self.palettes = bits, linear.out_features // (rows or linear.out_features)
        self.bias = linear.bias
        if initial.pending(linear.weight) is None:
            self.codes = self.take(linear.weight.data)
        else:
            self.codes = nn.Parameter(linear.weight.data, requires_grad=False)
            initial.hand_on(linear.weight, self.codes, keep=self.take)

    def take(self, weight: Tensor) -> nn.Parameter:
        """Choose the palettes of ``weight``, keep them, and give its codes."""
        values_GN = weight.detach().reshape(self.palettes, -1)
        chosen = palettes(values_GN, self.bits)
        self.register_buffer("palette", chosen.to(weight.dtype))
        codes = pack(indices_of(values_GN, chosen), self.bits)
        return nn.Parameter(codes, requires_grad=False)

    def whole(self) -> Tensor:
        """The weight [out, in]."""
        count = self.out_features * self.in_features
        indices = unpack(self.codes, self.bits, count).int().view(self.palettes, -1)
        if self.palettes > 1:
            first = torch.arange(self.palettes, dtype=torch.int32, device=indices.device)
            indices = indices + (first << self.bits)[:, None]
        values = self.palette.flatten().index_select(0, indices.flatten())
        return values.view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.whole(), self.bias)


def palettize(module: nn.Module, names: list[str], bits: int, rows: int) -> None:
    """Replace the linear layers of these names."""
    for name in names:
        module.set_submodule(name, PaletteLinear(module.get_submodule(name), bits, rows))

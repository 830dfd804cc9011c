"""A small model that is no DiT, and no kin of one: what the contract of a subject is tried on.

Two kinds of blocks, called with keywords, of which one returns a pair and owns a weight itself;
queries, keys and values apart, and torch's attention with nothing in between that could be
replaced; no table of labels. ``--model tests/made/strip.py:Strip`` names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strategies.subject import Subject

__all__ = ["Strip"]

WIDTH, HEADS, PATCH = 128, 4, 8


class Mixer(nn.Module):
    """A convolution along the tokens, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.along = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.across = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, *, signal: Tensor) -> Tensor:
        mixed = self.along(self.norm(tokens).transpose(1, 2)).transpose(1, 2)
        return tokens + self.across(F.silu(mixed + signal[:, None]))


class Layer(nn.Module):
    """Attention and an MLP, gated by a weight that no submodule owns."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.modulation = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
        shift = self.modulation(signal)[:, None]
        inner = self.norm(tokens) + shift
        q, k, v = (
            f(inner).unflatten(2, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(query=q, key=k, value=v)
        tokens = tokens + self.gate * self.o(attended.transpose(1, 2).flatten(2))
        return tokens + self.gate * self.down(F.gelu(self.up(tokens))), shift


class Net(nn.Module):
    """Patches to tokens, mixers, layers, and tokens to patches."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.enter = nn.Linear(channels * PATCH**2, WIDTH)
        self.time, self.label = nn.Linear(1, WIDTH), nn.Linear(classes, WIDTH)
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.leave = nn.Linear(WIDTH, channels * PATCH**2)

    def forward(self, *, sample: Tensor, time: Tensor, label: Tensor, drop: Tensor) -> Tensor:
        dtype = self.enter.bias.dtype
        known = F.one_hot(label, self.classes) * ~drop[:, None]
        signal = self.time(time.to(dtype)[:, None]) + self.label(known.to(dtype))
        patches = F.unfold(sample.to(dtype), PATCH, stride=PATCH).transpose(1, 2)
        tokens = self.enter(patches)
        for mixer in self.mixers:
            tokens = mixer(tokens, signal=signal)
        for layer in self.layers:
            tokens, shift = layer(tokens, signal)
            tokens = tokens + 0.1 * shift
        size = sample.shape[-2:]
        return F.fold(self.leave(tokens).transpose(1, 2), size, PATCH, stride=PATCH)


@dataclass(frozen=True, kw_only=True)
class Strip(Subject):
    """The model above, which comes in one size."""

    parts: ClassVar[Mapping[str, str]] = {"head": "leave"}
    tile: ClassVar[int] = PATCH

    def make(self) -> nn.Module:
        return Net(self.data.channels, self.data.classes)

    def groups(self, module: Any) -> list[Sequence[nn.Module]]:
        return [module.mixers, module.layers]

    def predict(self, model: Any, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]) -> Any:
        return model(sample=x, time=t_B, label=conditions["y"], drop=conditions["drop"])

"""The layers of a DiT: embedders, attention, MLP, block and final layer.

Shape suffixes: B batch, C channels, V frames of a video, H height, W width of the latent; T tokens,
D hidden size, F frequencies, N attention heads, K head size. adaLN's shift, scale and gate are
[B, 1, D].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.subjects.dit.presets import FREQUENCIES

__all__ = [
    "Attention",
    "Block",
    "FinalLayer",
    "LabelEmbedder",
    "Mlp",
    "PatchEmbed",
    "TimestepEmbedder",
    "attend",
]


def attend(q_BNTK: Tensor, k_BNTK: Tensor, v_BNTK: Tensor) -> Tensor:
    """Softmax attention, torch's choice of kernel; the default of ``Attention.attend``."""
    return F.scaled_dot_product_attention(q_BNTK, k_BNTK, v_BNTK)


class PatchEmbed(nn.Module):
    """Non-overlapping patches to tokens: [B, C, H, W], or a video [B, C, V, H, W] frame by frame,
    -> [B, T, D]."""

    def __init__(self, patch_size: int, channels: int, hidden_size: int):
        super().__init__()
        self.proj = nn.Conv2d(channels, hidden_size, patch_size, stride=patch_size)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        if x_BCHW.ndim == 5:
            frames = x_BCHW.transpose(1, 2)
            return self(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]).flatten(1, 2)
        return self.proj(x_BCHW).flatten(2).transpose(1, 2)


class TimestepEmbedder(nn.Module):
    """Timesteps, whole or fractional, to vectors: [B] -> [B, D]."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(FREQUENCIES, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )

    @staticmethod
    def frequencies(t_B: Tensor) -> Tensor:
        """Cosines, then sines, of t at geometric frequencies 1 .. 1/10000: [B] -> [B, F] float32.

        Computed on the device at every call: a buffer would be rounded with the weights when the
        model is turned to bfloat16, and t up to 999 needs more than its 8 bits.
        """
        half = FREQUENCIES // 2
        index = torch.arange(half, dtype=torch.float32, device=t_B.device)
        angle_BF = t_B[:, None].float() * torch.exp(index * -math.log(10000) / half)
        return torch.cat([angle_BF.cos(), angle_BF.sin()], dim=-1)

    def forward(self, t_B: Tensor, dtype: torch.dtype) -> Tensor:
        return self.mlp(self.frequencies(t_B).to(dtype))


class LabelEmbedder(nn.Module):
    """Class labels to vectors, [B] -> [B, D]; the last row of the table stands for "no class"."""

    def __init__(self, classes: int, hidden_size: int, dropout: float):
        super().__init__()
        self.embedding_table = nn.Embedding(classes + (dropout > 0), hidden_size)
        self.num_classes = classes
        self.dropout_prob = dropout

    def forward(self, y_B: Tensor, drop_B: Tensor | None) -> Tensor:
        """``drop_B`` says which labels are withheld; without it chance does, in training only."""
        if drop_B is None and self.training and self.dropout_prob > 0:
            drop_B = torch.rand(len(y_B), device=y_B.device) < self.dropout_prob
        if drop_B is not None:
            y_B = torch.where(drop_B, self.num_classes, y_B)
        return self.embedding_table(y_B)


class Attention(nn.Module):
    """Multi-head self-attention, [B, T, D] -> [B, T, D]; ``attend`` may be replaced."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = attend

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv_BT3NK = self.qkv(x_BTD).unflatten(2, (3, self.num_heads, -1))
        q_BNTK, k_BNTK, v_BNTK = qkv_BT3NK.permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(self.attend(q_BNTK, k_BNTK, v_BNTK).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers with the tanh form of GELU between: [B, T, D] -> [B, T, D]."""

    def __init__(self, hidden_size: int, inner_size: int):
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, inner_size)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(inner_size, hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x_BTD)))


def _modulation(hidden_size: int, parts: int) -> nn.Sequential:
    return nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, parts * hidden_size))


def _norm(hidden_size: int) -> nn.LayerNorm:
    return nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)


class Block(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the condition (adaLN-Zero)."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float):
        super().__init__()
        self.norm1 = _norm(hidden_size)
        self.attn = Attention(hidden_size, num_heads)
        self.norm2 = _norm(hidden_size)
        self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio))
        self.adaLN_modulation = _modulation(hidden_size, 6)

    def forward(self, x_BTD: Tensor, c_BD: Tensor) -> Tensor:
        parts = self.adaLN_modulation(c_BD).unsqueeze(1).chunk(6, dim=2)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        # addcmul(a, b, c) = a + b * c in one pass over memory instead of two.
        attended = self.attn(torch.addcmul(shift1, self.norm1(x_BTD), 1 + scale1))
        x_BTD = torch.addcmul(x_BTD, gate1, attended)
        mixed = self.mlp(torch.addcmul(shift2, self.norm2(x_BTD), 1 + scale2))
        return torch.addcmul(x_BTD, gate2, mixed)


class FinalLayer(nn.Module):
    """Tokens to patches of output: [B, T, D] -> [B, T, patch * patch * C]."""

    def __init__(self, hidden_size: int, patch_size: int, channels: int):
        super().__init__()
        self.norm_final = _norm(hidden_size)
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * channels)
        self.adaLN_modulation = _modulation(hidden_size, 2)

    def forward(self, x_BTD: Tensor, c_BD: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c_BD).unsqueeze(1).chunk(2, dim=2)
        return self.linear(torch.addcmul(shift, self.norm_final(x_BTD), 1 + scale))

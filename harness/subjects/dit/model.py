"""DiT: a transformer that denoises latents, after Peebles & Xie 2022 (arXiv:2212.09748).

Parameter names and shapes are those of the public reference (github.com/facebookresearch/DiT), so
that its checkpoints load with ``strict=True``.

Strategies may replace two callables, which own no parameters: ``DiT.run_blocks`` (runs the blocks)
and ``Attention.attend`` (computes attention). ``DiT.part`` (index, count) is the stripe of rows of
each sample that the model gets: (0, 1), the whole, unless ranks share samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.subjects.dit.presets import FREQUENCIES
from strategies import initial
from strategies.initial import Draw

# ---- layers ----
# Shape suffixes: B batch, C channels, H height, W width of the latent; T tokens, D hidden size, F
# frequencies, N attention heads, K head size. adaLN's shift, scale and gate are [B, 1, D].


def attend(q_BNTK: Tensor, k_BNTK: Tensor, v_BNTK: Tensor) -> Tensor:
    """Softmax attention with the kernel that torch selects; the default of ``Attention.attend``."""
    return F.scaled_dot_product_attention(q_BNTK, k_BNTK, v_BNTK)


class PatchEmbed(nn.Module):
    """Non-overlapping patches to tokens: [B, C, H, W] -> [B, T, D]."""

    def __init__(self, patch_size: int, channels: int, hidden_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, hidden_size, patch_size, stride=patch_size)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.proj(x_BCHW).flatten(2).transpose(1, 2)


class TimestepEmbedder(nn.Module):
    """Whole or fractional timesteps to vectors: [B] -> [B, D]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(FREQUENCIES, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )

    @staticmethod
    def frequencies(t_B: Tensor) -> Tensor:
        """Return cosines, then sines, of t at geometric frequencies 1 .. 1/10000: [B] -> [B, F]
        float32.

        They are computed on the device at every call. A buffer would be rounded when the model is
        converted to bfloat16, and t up to 999 needs more than its 8 bits.
        """
        half = FREQUENCIES // 2
        index = torch.arange(half, dtype=torch.float32, device=t_B.device)
        angle_BF = t_B[:, None].float() * torch.exp(index * -math.log(10000) / half)
        return torch.cat([angle_BF.cos(), angle_BF.sin()], dim=-1)

    def forward(self, t_B: Tensor, dtype: torch.dtype) -> Tensor:
        return self.mlp(self.frequencies(t_B).to(dtype))


class LabelEmbedder(nn.Module):
    """Class labels to vectors, [B] -> [B, D]; the last row of the table is "no class"."""

    def __init__(self, classes: int, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(classes + (dropout > 0), hidden_size)
        self.num_classes = classes
        self.dropout_prob = dropout

    def forward(self, y_B: Tensor, drop_B: Tensor | None) -> Tensor:
        """``drop_B`` are the withheld labels; without it they are random, and only in training."""
        if drop_B is None and self.training and self.dropout_prob > 0:
            drop_B = torch.rand(len(y_B), device=y_B.device) < self.dropout_prob
        if drop_B is not None:
            y_B = torch.where(drop_B, self.num_classes, y_B)
        return self.embedding_table(y_B)


class Attention(nn.Module):
    """Multi-head self-attention, [B, T, D] -> [B, T, D]; strategies may replace ``attend``."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
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

    def __init__(self, hidden_size: int, inner_size: int) -> None:
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

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float) -> None:
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

    def __init__(self, hidden_size: int, patch_size: int, channels: int) -> None:
        super().__init__()
        self.norm_final = _norm(hidden_size)
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * channels)
        self.adaLN_modulation = _modulation(hidden_size, 2)

    def forward(self, x_BTD: Tensor, c_BD: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c_BD).unsqueeze(1).chunk(2, dim=2)
        return self.linear(torch.addcmul(shift, self.norm_final(x_BTD), 1 + scale))


# ---- initial weights ----
# Each weight depends on its name and the seed only.


AWAKE_STD = 0.02
ZERO = ("adaLN_modulation", "final_layer.linear")
"""Weights that adaLN-Zero starts at zero.

At zero every block is the identity and the output is constant, so the first optimizer steps give
almost all weights no gradient. Two strategies would then agree in loss even if one of them broke
the blocks. "awake" fills them with N(0, 0.02).
"""
NARROW = ("t_embedder", "y_embedder", "x_embedder.table")


@torch.no_grad()
def start(
    name: str,
    p: Tensor,
    *,
    awake: bool = False,
    generator: torch.Generator | None = None,
) -> None:
    """Fill the parameter ``name`` as the reference does, in place; ``awake``: its zeros too.

    Args:
        generator: source of random values; None for torch's own.
    """
    if name == "pos_embed":
        p.copy_(torch.from_numpy(sincos_table(p.shape[-1], math.isqrt(p.shape[1]))))
    elif any(word in name for word in ZERO):
        nn.init.normal_(p, std=AWAKE_STD, generator=generator) if awake else nn.init.zeros_(p)
    elif name.endswith("bias"):
        nn.init.zeros_(p)
    elif name.startswith(NARROW):
        nn.init.normal_(p, std=0.02, generator=generator)
    else:
        # A patch embedding is a linear layer, stored as a convolution.
        nn.init.xavier_uniform_(p.view(len(p), -1), generator=generator)


def draws(seed: int, init: str) -> Draw:
    """Return each initial weight of a DiT from ``seed`` and its name: see ``Subject.draws``.

    Args:
        init: "adaln_zero", the reference's, or "awake", which fills its zeros.
    """

    def draw(name: str, like: Tensor) -> Tensor:
        values = torch.empty(like.shape, device="cpu")
        generator = initial.keyed(seed, name)
        start(name, values, awake=init == "awake", generator=generator)
        return values

    return draw


def sincos_table(hidden_size: int, grid: int) -> np.ndarray:
    """Return position embeddings float64 [grid * grid, D]: of the column, then of the row.

    The column comes first as in MAE (arXiv:2111.06377), the source of the reference's table. Each
    has sines, then cosines, on an equal share of the width.
    """
    rows, columns = np.divmod(np.arange(grid * grid), grid)
    count = hidden_size // 4
    omega = 10000.0 ** -(np.arange(count) / count)
    angles = [np.outer(place, omega) for place in (columns, rows)]
    return np.concatenate([f(a) for a in angles for f in (np.sin, np.cos)], axis=1)


def run_blocks(blocks: Iterable[nn.Module], x_BTD: Tensor, c_BD: Tensor) -> Tensor:
    """Run the blocks in order; the default of ``DiT.run_blocks``."""
    for block in blocks:
        x_BTD = block(x_BTD, c_BD)
    return x_BTD


class DiT(nn.Module):
    """A diffusion transformer; the arguments are the reference's."""

    ends = (("x_embedder", "t_embedder", "y_embedder", "pos_embed"), ("final_layer",))
    """Modules that ``enter`` and ``leave`` use."""

    def __init__(
        self,
        input_size: int = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        class_dropout_prob: float = 0.1,
        num_classes: int = 1000,
        learn_sigma: bool = True,
    ):
        super().__init__()
        self.out_channels = in_channels * (1 + learn_sigma)
        self.patch_size = patch_size
        self.grid = input_size // patch_size
        self.x_embedder = PatchEmbed(patch_size, in_channels, hidden_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size, class_dropout_prob)
        # Frozen, yet a parameter, as in the reference's checkpoints and counts.
        table = torch.zeros(1, self.grid**2, hidden_size)
        self.pos_embed = nn.Parameter(table, requires_grad=False)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads, mlp_ratio) for _ in range(depth))
        self.final_layer = FinalLayer(hidden_size, patch_size, self.out_channels)
        self.run_blocks: Callable[[nn.ModuleList, Tensor, Tensor], Tensor] = run_blocks
        self.part: tuple[int, int] = (0, 1)
        # As the reference does. A run draws each parameter by its name instead (``draws``).
        for name, p in self.named_parameters():
            start(name, p)

    def forward(
        self, x_BCHW: Tensor, t_B: Tensor, y_B: Tensor, drop_B: Tensor | None = None, *more: Tensor
    ) -> Tensor:
        """Predict noise (and its variance), or velocity, from noisy latents.

        Args:
            x_BCHW: noisy latents, or their stripe as given by ``part``; cast to the weights' dtype.
            t_B: timesteps, whole (0..999) or fractional.
            y_B: int64 class labels; ``num_classes`` means none.
            drop_B: bool, the labels to withhold. None: random in training, none in eval.
            more: further inputs for ``leave``.

        Returns:
            [B, out_channels, H, W] of the same rows, in the compute dtype; the loss upcasts.
        """
        given = (x_BCHW, t_B, y_B, drop_B, *more)
        x_BTD, c_BD = self.enter(*given)
        x_BTD = self.run_blocks(self.blocks, x_BTD, c_BD)
        return self.leave(x_BTD, c_BD, *given)

    def enter(
        self, x_BCHW: Tensor, t_B: Tensor, y_B: Tensor, drop_B: Tensor | None = None, *_: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Convert the inputs of ``forward`` to the inputs of the blocks.

        They are tokens [B, T, D], which each block returns anew, and the condition [B, D].
        """
        # The position table has the model's dtype: it is never quantised or adapted.
        dtype = self.pos_embed.dtype
        x = x_BCHW.to(dtype) if x_BCHW.is_floating_point() else x_BCHW  # tokens index a table
        x_BTD = self.x_embedder(x) + self.positions()
        return x_BTD, self.t_embedder(t_B, dtype) + self.y_embedder(y_B, drop_B)

    def leave(self, x_BTD: Tensor, c_BD: Tensor, *given: Any) -> Tensor:
        """Convert the last block's tokens to the output; ``given`` are the inputs of
        ``forward``."""
        return self.unpatchify(self.final_layer(x_BTD, c_BD))

    def positions(self) -> Tensor:
        """Return the rows of the position table for the given tokens: [1, T, D]."""
        index, count = self.part
        if count == 1:
            return self.pos_embed
        of_rows = self.pos_embed.unflatten(1, (self.grid, self.grid))
        return of_rows.chunk(count, dim=1)[index].flatten(1, 2)

    def unpatchify(self, x_BTP: Tensor) -> Tensor:
        """Convert [B, T, patch * patch * C] to [B, C, H, W]."""
        x = x_BTP.unflatten(2, (self.patch_size, self.patch_size, self.out_channels))
        x = x.unflatten(1, (-1, self.grid)).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(len(x), self.out_channels, -1, self.grid * self.patch_size)

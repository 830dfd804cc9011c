"""DiT: a transformer that denoises latents, after Peebles & Xie 2022 (arXiv:2212.09748).

Written anew; parameter names and shapes are those of the public reference
(github.com/facebookresearch/DiT), so that its checkpoints load with ``strict=True``.

Shape suffixes as in ``harness.subjects.dit.layers``.

Two places are left open for strategies, both plain callables that own no parameters:
``DiT.run_blocks`` (how the blocks are run) and ``Attention.attend`` (how attention is computed).
``DiT.part`` (index, count) says which of so many stripes of rows of each sample is given: (0, 1),
the whole, unless ranks share samples.

Of a video (``frames`` above 1) each frame is cut into patches as an image is, and attention sees
the tokens of all frames. Weights are an image model's, so that its checkpoints fit but for the
table of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from harness.subjects.dit.layers import (
    Block,
    FinalLayer,
    LabelEmbedder,
    PatchEmbed,
    TimestepEmbedder,
)
from harness.subjects.dit.presets import shape_of
from harness.subjects.dit.start import draws, start
from harness.subjects.guidance import guide
from strategies import initial

__all__ = ["DiT", "build", "make", "run_blocks"]


def run_blocks(blocks: Iterable[nn.Module], x_BTD: Tensor, c_BD: Tensor) -> Tensor:
    """Run the blocks in order; the default of ``DiT.run_blocks``."""
    for block in blocks:
        x_BTD = block(x_BTD, c_BD)
    return x_BTD


class DiT(nn.Module):
    """A diffusion transformer; the arguments are the reference's, and ``frames`` of a video."""

    ends = (("x_embedder", "t_embedder", "y_embedder", "pos_embed"), ("final_layer",))
    """What ``enter`` and ``leave`` use."""

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
        frames: int = 1,
    ):
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = in_channels * (1 + learn_sigma)
        self.learn_sigma = learn_sigma
        self.patch_size = patch_size
        self.grid = input_size // patch_size
        self.x_embedder = PatchEmbed(patch_size, in_channels, hidden_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size, class_dropout_prob)
        # Frozen, yet a parameter: the reference's checkpoints and counts have it so.
        self.frames = frames
        table = torch.zeros(1, frames * self.grid**2, hidden_size)
        self.pos_embed = nn.Parameter(table, requires_grad=False)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads, mlp_ratio) for _ in range(depth))
        self.final_layer = FinalLayer(hidden_size, patch_size, self.out_channels)
        self.run_blocks: Callable[[nn.ModuleList, Tensor, Tensor], Tensor] = run_blocks
        self.part: tuple[int, int] = (0, 1)
        self.initialize_weights()

    def forward(
        self, x_BCHW: Tensor, t_B: Tensor, y_B: Tensor, drop_B: Tensor | None = None
    ) -> Tensor:
        """Predict noise (and its variance), or velocity, from noisy latents.

        Args:
            x_BCHW: noisy latents, of a video [B, C, V, H, W], or the stripe of them that ``part``
                says; cast to the weights' dtype.
            t_B: timesteps, whole (0..999) or fractional.
            y_B: int64 class labels; ``num_classes`` means none.
            drop_B: bool, which labels to withhold. None: chance decides in training, none in eval.

        Returns:
            [B, out_channels, H, W], or [B, out_channels, V, H, W], of the same rows, in the compute
            dtype; the loss upcasts.
        """
        x_BTD, c_BD = self.enter(x_BCHW, t_B, y_B, drop_B)
        x_BTD = self.run_blocks(self.blocks, x_BTD, c_BD)
        return self.leave(x_BTD, c_BD)

    def enter(
        self, x_BCHW: Tensor, t_B: Tensor, y_B: Tensor, drop_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """From what ``forward`` is given to what passes through the blocks: tokens [B, T, D], which
        each returns anew, and the condition [B, D]."""
        # The position table's dtype is the model's: it alone is never quantised or adapted.
        dtype = self.pos_embed.dtype
        x_BTD = self.x_embedder(x_BCHW.to(dtype)) + self.positions()
        return x_BTD, self.t_embedder(t_B, dtype) + self.y_embedder(y_B, drop_B)

    def leave(self, x_BTD: Tensor, c_BD: Tensor, *given: Any) -> Tensor:
        """From the last block's tokens to the prediction; ``given`` is what ``forward`` was."""
        return self.unpatchify(self.final_layer(x_BTD, c_BD))

    def positions(self) -> Tensor:
        """The rows of the position table that belong to the tokens given: [1, T, D]."""
        index, count = self.part
        if count == 1:
            return self.pos_embed
        of_rows = self.pos_embed.unflatten(1, (self.frames, self.grid, self.grid))
        return of_rows.chunk(count, dim=2)[index].flatten(1, 3)

    def unpatchify(self, x_BTP: Tensor) -> Tensor:
        """[B, T, patch * patch * C] -> [B, C, H, W], of a video [B, C, V, H, W]."""
        size, video = self.grid * self.patch_size, [self.frames] * (self.frames > 1)
        x = x_BTP.unflatten(2, (self.patch_size, self.patch_size, self.out_channels))
        x = x.unflatten(1, (self.frames, -1, self.grid)).permute(0, 6, 1, 2, 4, 3, 5)
        return x.reshape(len(x), self.out_channels, *video, -1, size)

    def forward_with_cfg(
        self, x_BCHW: Tensor, t_B: Tensor, y_B: Tensor, cfg_scale: float, channels: int | None = 3
    ) -> Tensor:
        """Guided forward as in the reference: the second half of the batch carries null labels.

        Args:
            channels: leading channels to guide; 3 is what the published samples were made with,
                None guides all ``in_channels``.

        Returns:
            [B, out_channels, H, W]: the guided half twice, then each half's own other channels.
        """
        channels = self.in_channels if channels is None else channels
        first = x_BCHW.chunk(2)[0]
        out = self(torch.cat([first, first]), t_B, y_B)
        guided = guide(out[:, :channels], cfg_scale)
        return torch.cat([torch.cat([guided, guided]), out[:, channels:]], dim=1)

    def initialize_weights(self) -> None:
        """The reference's initialisation, by torch's generator; sets every parameter, so a model on
        storage from ``to_empty`` needs no more than this call. A run draws each by its name
        instead (``harness.subjects.dit.start``)."""
        for name, p in self.named_parameters():
            start(name, p, frames=self.frames)


def make(
    preset: str,
    *,
    input_size: int,
    channels: int,
    classes: int,
    learn_sigma: bool = True,
    class_dropout: float = 0.1,
    frames: int = 1,
) -> DiT:
    """A DiT on torch's current default device.

    Args:
        preset: a name in ``harness.subjects.dit.presets.PRESETS``, or a size (``shape_of``).
        learn_sigma: the objective's; doubles the output channels.
        class_dropout: only whether it is 0 matters here: then the table has no null row.

    Raises:
        ValueError: an unknown preset, or a patch that does not tile the input.
    """
    shape = shape_of(preset)
    shape.tokens(input_size)
    return DiT(
        input_size, shape.patch_size, channels, shape.hidden_size, shape.depth,
        shape.num_heads, shape.mlp_ratio, class_dropout, classes, learn_sigma, frames,
    )  # fmt: skip


def build(preset: str, *, seed: int, init: str = "adaln_zero", **sizes: Any) -> DiT:
    """A DiT on the CPU with float32 weights that depend on the arguments alone.

    Args:
        init: "adaln_zero", the reference's, or "awake", which fills its zeros.
        sizes: as ``make`` takes them.

    Raises:
        ValueError: an unknown init, or as ``make``.
    """
    draw = draws(seed, init, sizes.get("frames", 1))
    model = initial.skeleton(lambda: make(preset, **sizes), draw)
    initial.fill(model, draw, "cpu")
    return model

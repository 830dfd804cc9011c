"""ControlNet block: a frozen block with a trained copy. Imports torch.

Shape suffixes: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def silent(like: Tensor) -> nn.Linear:
    """Return a linear layer of zeros."""
    layer = nn.Linear(like.shape[-1], like.shape[-1], dtype=like.dtype)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Controlled(nn.Module):
    """Frozen ``block`` plus a trained ``copy`` whose output enters through a zero layer.

    The two streams are one tensor of twice the tokens, from the ``first`` to the ``last`` such
    block. Any runner of the blocks (in segments, recomputed, compiled) thus runs both.
    """

    def __init__(self, block: nn.Module, like: Tensor, first: bool, last: bool) -> None:
        """Copy the block; ``like`` has the model's width and dtype."""
        super().__init__()
        self.block, self.copy = block, copy.deepcopy(block)
        self.zero = silent(like)
        self.enter = silent(like) if first else None
        self.last = last

    # The names of a subject's layers, such as blocks.0.attn.qkv, lead to the frozen block.

    @property
    def attn(self) -> nn.Module:
        return self.block.attn

    @property
    def mlp(self) -> nn.Module:
        return self.block.mlp

    def forward(self, x_BTD: Tensor, c_BD: Tensor) -> Tensor:
        main_BTD, side_BTD = (x_BTD, x_BTD) if self.enter else x_BTD.chunk(2, dim=1)
        if self.enter:
            side_BTD = side_BTD + self.enter(x_BTD)
        side_BTD = self.copy(side_BTD, c_BD)
        main_BTD = self.block(main_BTD, c_BD) + self.zero(side_BTD)
        return main_BTD if self.last else torch.cat([main_BTD, side_BTD], dim=1)

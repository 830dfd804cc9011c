"""Model of a DiT over tokens.

Shape suffixes as in ``harness.subjects.dit.model``; V: words of the vocabulary, N: tokens of all
samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.subjects.dit.model import DiT, FinalLayer
from strategies.losses.functions import Function, full

TARGETS = 4
"""Index of the targets in the model's inputs."""


class TokenEmbed(nn.Module):
    """Tokens to vectors: [B, T] -> [B, T, D]; a token below zero is hidden, and has its own row."""

    def __init__(self, words: int, hidden_size: int) -> None:
        super().__init__()
        self.words, self.table = words, nn.Embedding(words + 1, hidden_size)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.table(torch.where(tokens_BT < 0, self.words, tokens_BT))


class Vocabulary(nn.Linear):
    """Hidden states to logits over a vocabulary, or with targets to the sum of their cross
    entropies.

    Strategies may replace ``cross_entropy``.
    """

    def __init__(self, hidden_size: int, words: int) -> None:
        super().__init__(hidden_size, words)
        self.cross_entropy: Function = full

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        if targets_BT is None:
            return F.linear(x_BTD, self.weight, self.bias)
        x_ND, targets_N = x_BTD.flatten(0, 1), targets_BT.flatten()
        return self.cross_entropy(x_ND, self.weight, self.bias, targets_N)


class TokenHead(FinalLayer):
    """The DiT's final layer over a vocabulary: [B, T, D] -> logits [B, T, V], or the loss."""

    def __init__(self, hidden_size: int, words: int) -> None:
        super().__init__(hidden_size, 1, 1)
        self.linear = Vocabulary(hidden_size, words)

    def forward(self, x_BTD: Tensor, c_BD: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        shift, scale = self.adaLN_modulation(c_BD).unsqueeze(1).chunk(2, dim=2)
        hidden = torch.addcmul(shift, self.norm_final(x_BTD), 1 + scale)
        return self.linear(hidden, targets_BT)


class TokenDiT(DiT):
    """A DiT whose samples are tokens: ``forward(tokens_BT, t_B, y_B, drop_B, targets_BT)``.

    - ``tokens_BT``: int64, below zero if hidden; or their part as given by ``part``.
    - ``t_B``: in [0, 1); a smaller value hides more tokens.
    - ``targets_BT``: -100 for none.

    It returns logits [B, T, V], or with targets the mean cross entropy over all tokens, [1]. The
    mean covers all tokens, not only hidden ones. So if ranks share the tokens, the mean of their
    means is the whole's, for any number of hidden tokens in each part.
    """

    def __init__(self, words: int, **sizes: Any) -> None:
        super().__init__(**sizes, learn_sigma=False)
        self.x_embedder = TokenEmbed(words, sizes["hidden_size"])
        self.final_layer = TokenHead(sizes["hidden_size"], words)

    def leave(self, x_BTD: Tensor, c_BD: Tensor, *given: Any) -> Tensor:
        """Convert the last block's tokens to logits, or to the loss if ``given`` has targets."""
        targets_BT = given[TARGETS] if len(given) > TARGETS else None
        out = self.final_layer(x_BTD, c_BD, targets_BT)
        return out if targets_BT is None else out.float().reshape(1) / targets_BT.numel()

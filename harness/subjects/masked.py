"""Masked tokens: some of a sample's tokens are hidden, and predicted from the others.

As MaskGIT trains (Chang et al. 2022, arXiv:2202.04200): a share cos(pi u / 2) of the tokens is
hidden, u uniform, and the loss is the cross entropy of the hidden ones. One thing differs: the sum
is divided by the number of all tokens, not of the hidden ones, so that a step's loss does not
depend on how the batch was cut (masked diffusion, arXiv:2406.07524, differs in weights alone).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from strategies.losses.functions import IGNORED

__all__ = ["Masked"]


class Masked:
    """Samples are tokens int64 [B, T]; the model takes them in pairs [B, 2, T]: what it sees, with
    ``HIDDEN`` where a token is hidden, and what it is to say there, ``IGNORED`` elsewhere."""

    HIDDEN = -1

    def draw(self, generator, count, sample_shape, device):
        """See ``Objective.draw``; t is u, the noise says which tokens are hidden first."""
        t_B = torch.rand(count, generator=generator, device=device)
        return t_B, torch.rand((count, *sample_shape), generator=generator, device=device)

    def loss(self, predict: Any, x_BT: Tensor, t_B: Tensor, noise_BT: Tensor) -> Tensor:
        """See ``Objective.loss``; [1], the mean over the batch's tokens, 0 where one was seen."""
        hidden_BT = noise_BT < torch.cos(t_B * (math.pi / 2))[:, None]
        seen = torch.where(hidden_BT, self.HIDDEN, x_BT)
        wanted = torch.where(hidden_BT, x_BT, IGNORED)
        return predict(torch.stack([seen, wanted], 1), t_B).float().reshape(-1)

    def sample(self, predict, noise_BCHW, *, steps, generator):
        """Samples of such models are codes of a tokenizer that is not here."""
        raise NotImplementedError("samples are drawn of epsilon and flow")

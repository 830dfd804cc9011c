"""Classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598).

Shape suffixes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from strategies.subject import Subject

__all__ = ["guide", "guided"]


def guide(out_BCHW: Tensor, scale: float, channels: int | None = None) -> Tensor:
    """Outputs moved away from those without conditions.

    Args:
        out_BCHW: outputs for the same inputs with labels (first half) and without (second half).
        scale: 1 is the conditional output, more moves away from the unconditional one.
        channels: how many leading channels are guided; None for all.

    Returns:
        The first half's outputs, [B / 2, C, H, W], guided.
    """
    conditional, unconditional = out_BCHW.chunk(2)
    moved = torch.lerp(unconditional[:, :channels], conditional[:, :channels], scale)
    return moved if channels is None else torch.cat([moved, conditional[:, channels:]], dim=1)


def guided(
    subject: Subject,
    module: nn.Module,
    conditions: Mapping[str, Tensor],
    scale: float,
    channels: int | None = None,
) -> Callable[[Tensor, Tensor], Tensor]:
    """A prediction (x, t) of the bare ``module``, guided by ``scale`` towards ``conditions``.

    ``channels``: how many leading channels of the output are guided; None for the data's.
    """
    first = next(iter(conditions.values()))
    none_B = torch.zeros(len(first), dtype=torch.bool, device=first.device)
    if scale == 1:
        withheld_none = dict(conditions) | {"drop": none_B}
        return lambda x, t_B: subject.predict(module, x, t_B, withheld_none)
    twice = {name: torch.cat([value, value]) for name, value in conditions.items()}
    twice["drop"] = torch.cat([none_B, ~none_B])
    leading = subject.data.channels if channels is None else channels

    def predict(x: Tensor, t_B: Tensor) -> Tensor:
        out = subject.predict(module, torch.cat([x, x]), torch.cat([t_B, t_B]), twice)
        return guide(out, scale, leading)

    return predict

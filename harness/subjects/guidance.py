"""Classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598).

Shape suffixes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from strategies.subject import Subject

__all__ = ["Ask", "guide", "guided", "guided_by"]

Ask = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""(x, t, conditions) -> the model's output for them."""


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
    leading = subject.data.channels if channels is None else channels

    def ask(x: Tensor, t_B: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return subject.predict(module, x, t_B, given)

    return guided_by(ask, conditions, scale, leading)


def guided_by(
    ask: Ask, conditions: Mapping[str, Tensor], scale: float, leading: int, *, apart: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    """A prediction (x, t), guided by ``scale`` towards ``conditions``, of what ``ask`` predicts.

    ``leading`` channels of the output are guided. ``apart``: the predictions with and without the
    conditions are asked for one after the other, not in one batch of twice the samples.
    """
    first = next(iter(conditions.values()))
    none_B = torch.zeros(len(first), dtype=torch.bool, device=first.device)
    held = dict(conditions) | {"drop": none_B}
    if scale == 1:
        return lambda x, t_B: ask(x, t_B, held)
    withheld = dict(conditions) | {"drop": ~none_B}
    if apart:
        return lambda x, t_B: guide(
            torch.cat([ask(x, t_B, held), ask(x, t_B, withheld)]), scale, leading
        )
    twice = {name: torch.cat([value, withheld[name]]) for name, value in held.items()}

    def predict(x: Tensor, t_B: Tensor) -> Tensor:
        return guide(ask(torch.cat([x, x]), torch.cat([t_B, t_B]), twice), scale, leading)

    return predict

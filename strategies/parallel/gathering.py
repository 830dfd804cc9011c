"""Weights that neighbours cut among themselves, put together again, and sums over all of a model's
weights.

Imports torch: import it only where it is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.holdings import Fragment
from strategies.parallel.products import layers
from strategies.parallel.shares import share_of

if TYPE_CHECKING:
    from strategies.engine import Trained

__all__ = ["fragments", "group_of", "norm", "whole"]


def group_of(module: nn.Module) -> Any:
    """The ranks that have a part each of the same weights."""
    return layers(module)[0].group


def whole(mine: Tensor, p: Tensor, group: Any) -> Tensor:
    """What ``mine``, laid out as the part ``p`` of a weight, is a part of; all ranks of the group
    call it. As it is where ``p`` is whole."""
    share = share_of(p)
    if share is None:
        return mine
    mine = mine.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(share.parts)]
    dist.all_gather(parts, mine, group=group)
    return share.joined(parts)


def norm(trained: Trained) -> Tensor:
    """Global L2 norm of the gradients: of each part once, and once of what all ranks have."""
    total = torch.nn.utils.get_total_norm
    grads = [(p.grad, share_of(p)) for p in trained.module.parameters() if p.grad is not None]
    parts = total([g for g, share in grads if share]).float().square()
    dist.all_reduce(parts, group=group_of(trained.module))
    alike = total([g for g, share in grads if not share]).float().square()
    return (parts + alike).sqrt()


def fragments(trained: Trained, *, copies: bool = False) -> Iterator[Fragment]:
    """``Engine.fragments``: parts come from the first ranks that have all of them together, what is
    whole from the main process."""
    rank, layout = trained.accelerator.process_index, trained.launch.layout
    named = [(n, p) for n, p in trained.module.named_parameters() if p.requires_grad]
    for index, (name, p) in enumerate(named):
        share = share_of(p)
        if share is None and (copies or rank == 0):
            yield Fragment(name, index, 0, p.numel(), 0)
        elif share is not None and (copies or layout.share(rank) == 0):
            for start, offset, numel in share.runs():
                yield Fragment(name, index, start, numel, offset)

"""Weights that neighbours cut among themselves, put together again, and sums over all of a model's
weights.

Imports torch: import it only where it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strategies.holdings import Fragment
from strategies.parallel.tensor.products import layers
from strategies.parallel.tensor.shares import Share, share_of

if TYPE_CHECKING:
    from strategies.engine import Trained

__all__ = ["group_of", "norm", "placed", "whole"]


def group_of(module: nn.Module) -> Any:
    """The ranks that have a part each of the same weights."""
    return layers(module)[0].group


def whole(mine: Tensor, p: Tensor, module: nn.Module) -> Tensor:
    """What ``mine``, laid out as the part ``p`` of a weight of ``module``, is a part of; all ranks
    that have the others call it. As it is where ``p`` is whole."""
    share, group = share_of(p), group_of(module)
    if share is None:
        return mine
    mine = mine.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(share.parts)]
    dist.all_gather(parts, mine, group=group)
    return share.joined(parts)


def norm(trained: Trained) -> Tensor:
    """Global L2 norm of the gradients: of each part once, and once of what all ranks have."""
    grads = [(p.grad, share_of(p)) for p in trained.module.parameters() if p.grad is not None]
    parts = _total([g for g, share in grads if share])
    dist.all_reduce(parts, group=group_of(trained.module))
    return (parts + _total([g for g, share in grads if not share])).sqrt()


def _total(gradients: list[Tensor]) -> Tensor:
    """The square of their norm, over all ranks that shard them."""
    found = torch.nn.utils.get_total_norm(gradients)
    found = found.full_tensor() if isinstance(found, DTensor) else found
    return found.float().square()


def placed(trained: Trained, own: Iterable[Fragment], *, copies: bool) -> Iterator[Fragment]:
    """An engine's ``own`` fragments, whose offsets are those in what this rank has part of, with
    offsets in the whole; what is whole on all neighbours comes from the first of them, unless
    ``copies`` are asked for."""
    parameters = dict(trained.module.named_parameters())
    first = trained.accelerator.process_index % trained.launch.layout.tensor == 0
    for piece in own:
        share = share_of(parameters[piece.name])
        if share is not None:
            yield from _within(piece, share)
        elif copies or first:
            yield piece


def _within(piece: Fragment, share: Share) -> Iterator[Fragment]:
    """A fragment of the part in the whole: as many as it touches runs."""
    end = piece.offset + piece.numel
    for start, offset, numel in share.runs():
        low, high = max(start, piece.offset), min(start + numel, end)
        if low < high:
            mine = piece.start + low - piece.offset
            yield Fragment(piece.name, piece.shard, mine, high - low, offset + low - start)

"""Attention of tokens that are cut among the ranks of a group: what each has to be given of others.

Both ways here move tensors once in forward and once in backward. They keep nothing for it, and a
rank's gradients are those of its own part of the loss: who averages gradients over all ranks has
the whole batch's.

Shape suffixes: B batch, N heads, T tokens, K head size; P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Around", "Gathered", "Ulysses", "neighbours", "plain"]

Attended = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS, TOKENS = 1, 2
"""Axes of what attention is given, [B, N, T, K]."""


def neighbours(ranks: int) -> Any:
    """The process group of this rank and those beside it, so many in all; all ranks call it."""
    return dist.new_subgroups(group_size=ranks)[0]


def exchanged(x: Tensor, group: Any, cut: int, joined: int) -> Tensor:
    """``x``, of which each rank keeps its own part along axis ``cut``, with that part of all other
    ranks' joined along axis ``joined``, in the order of the ranks."""
    sent = torch.stack(x.chunk(dist.get_world_size(group), cut))
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    del sent
    return torch.cat(got.unbind(0), joined)


class Exchange(torch.autograd.Function):
    """``exchanged``; backward sends each part back to where it came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, cut: int, joined: int) -> Tensor:
        ctx.group, ctx.axes = group, (cut, joined)
        return exchanged(x, group, cut, joined)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        cut, joined = ctx.axes
        return exchanged(grad, ctx.group, joined, cut), None, None, None


class Gather(torch.autograd.Function):
    """All ranks' ``x`` joined along the tokens; backward gives each rank the sum of all gradients
    of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        mine = x.contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        return torch.cat(parts, TOKENS)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        sent = torch.stack(grad.chunk(dist.get_world_size(ctx.group), TOKENS))
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=ctx.group)
        return got.sum(0), None


class Around:
    """What takes the place of an attention (``inner``) so that it sees the tokens of ``group``.

    ``forward_collectives`` and ``backward_collectives``: how often a rank sends. ``cut``: what of
    attention a rank has a part of ("heads", "queries", "keys").
    """

    forward_collectives: ClassVar[int]
    backward_collectives: ClassVar[int]
    cut: ClassVar[frozenset[str]]

    def __init__(self, inner: Attended, group: Any) -> None:
        self.inner, self.group = inner, group


class Ulysses(Around):
    """All tokens of a share of the heads: q, k, v [B, N, T/P, K] -> [B, N/P, T, K], attention, and
    back again. Source: Jacobs et al. 2023 (arXiv:2309.14509)."""

    forward_collectives, backward_collectives, cut = 4, 4, frozenset({"heads"})

    def __call__(self, q_BNTK: Tensor, k_BNTK: Tensor, v_BNTK: Tensor) -> Tensor:
        whole = (Exchange.apply(x, self.group, HEADS, TOKENS) for x in (q_BNTK, k_BNTK, v_BNTK))
        return Exchange.apply(self.inner(*whole), self.group, TOKENS, HEADS)


class Gathered(Around):
    """Keys and values of all tokens, queries of one's own: any number of heads will do."""

    forward_collectives, backward_collectives, cut = 2, 2, frozenset({"queries"})

    def __call__(self, q_BNTK: Tensor, k_BNTK: Tensor, v_BNTK: Tensor) -> Tensor:
        keys, values = (Gather.apply(x, self.group) for x in (k_BNTK, v_BNTK))
        return self.inner(q_BNTK, keys, values)


def plain(attend: Any) -> Any:
    """The attention of whole tokens inside one of the above; any other as it is."""
    return attend.inner if isinstance(attend, Around) else attend

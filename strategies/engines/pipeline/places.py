"""Where a rank is in a pipeline that is there once, or several times over other samples.

Ranks of one stage are neighbours (``Layout``): what is sent most often, tokens from stage to stage,
is the least there is to send, and gradients are averaged where wires are short.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from strategies.parallel import groups

__all__ = ["Places", "found"]

BUCKET = 25 * 2**20
"""Bytes of gradients that are averaged at a time: as many as DDP's."""


@dataclass(frozen=True)
class Places:
    """Of one rank: ``stage``, and which ``share`` of the samples its pipeline works on, of
    ``data``. ``pipe``: the ranks of that pipeline, ``replicas``: those of this stage in all; None:
    all ranks, and nobody else."""

    stage: int
    share: int
    data: int
    pipe: Any = None
    replicas: Any = None

    def rank(self, stage: int) -> int:
        """Who has a stage of this pipeline."""
        return stage * self.data + self.share

    def average(self, gradients: Iterable[Tensor]) -> None:
        """Have each gradient be the mean over this stage's replicas, in its place."""
        if self.data > 1:
            _added_up(gradients, self.data, self.replicas)

    def add_up(self, gradients: Iterable[Tensor], micro: int) -> None:
        """Have each gradient of what all stages of this pipeline have be the sum over them, and the
        mean over so many micro batches, in its place."""
        _added_up(gradients, micro, self.pipe)

    def everyone(self, value: Any) -> list[Any]:
        """``value`` of each stage of this pipeline, in order, on all of them."""
        told: list[Any] = [None] * dist.get_world_size(self.pipe)
        dist.all_gather_object(told, value, group=self.pipe)
        return told


def found(rank: int, ranks: int, data: int) -> Places:
    """The place of ``rank``; all ranks call it."""
    if data == 1:
        return Places(rank, 0, 1)
    own = groups.made(data, ranks)
    return Places(rank // data, rank % data, data, pipe=own.alike, replicas=own.parts)


def _added_up(gradients: Iterable[Tensor], over: int, group: Any) -> None:
    for some in _take_tensors(gradients, BUCKET):
        bucket = _flatten_dense_tensors(some)
        dist.all_reduce(bucket.div_(over), group=group)
        torch._foreach_copy_(some, _unflatten_dense_tensors(bucket, some))

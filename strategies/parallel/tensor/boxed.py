"""Rows of a part of a weight, for torch's distributed checkpoints: where they lie in the whole, so
that what is written is a plain model's, and can be read by any number of ranks.

Imports torch: import it only where it is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strategies.parallel.tensor.shares import Share, share_of

__all__ = ["put", "taken"]


def put(mine: DTensor, p: Any) -> DTensor:
    """A DTensor of the whole shape, whose local tensor is this rank's rows of ``mine``, which is
    cut as the parameter ``p``: one shard for each box of the whole that they fill."""
    share = share_of(p)
    assert share is not None
    shape, start = compute_local_shape_and_global_offset(
        mine.shape, mine.device_mesh, mine.placements
    )
    wrapped = _shards(mine._local_tensor, share, start[0], shape[0])
    whole = {"shape": share.shape, "stride": torch.empty(share.shape, device="meta").stride()}
    return DTensor.from_local(wrapped, mine.device_mesh, mine.placements, run_check=False, **whole)


def _shards(rows: Tensor, share: Share, first: int, count: int) -> LocalShardsWrapper:
    found = list(share.boxes(first, count)) if count else []
    if not found:  # where no other shard begins, or one would be taken for the other
        found = [(0, 0, (share.shape[0], *[0] * (len(share.shape) - 1)))]
    shards = [rows[start : start + length].detach() for start, length, _ in found]
    return LocalShardsWrapper(shards, [offsets for *_, offsets in found])


def taken(saved: DTensor, p: Any) -> DTensor:
    """What ``put`` gave, as a checkpoint has filled it: cut as ``p`` again."""
    rows = torch.cat(saved._local_tensor.local_shards())
    return DTensor.from_local(
        rows, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )

"""A world of N on one process: it stands for rank 0 of an N-rank job.

torch's fake process group reports N ranks and moves nothing: an all-reduce leaves a tensor as it
is, a gather returns N copies of one's own, a reduce-scatter one's own part. The engines are real
and allocate what rank 0 of N would, so the memory is real; time is that of computation without
communication, and losses mean nothing. What NCCL itself holds on a GPU is not there.
"""

from __future__ import annotations

import torch

__all__ = ["simulate"]


def simulate(ranks: int, rank: int = 0) -> None:
    """Make this process ``rank`` of ``ranks``; to be called before Accelerator makes a group."""
    # A private module of torch's, and the only home of this store; torchtitan uses it too.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)

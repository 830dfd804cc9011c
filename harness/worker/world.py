"""A world of N on one process: it stands for rank 0 of an N-rank job.

torch's fake process group reports N ranks and moves nothing: an all-reduce leaves a tensor as it
is, a gather returns N copies of one's own, a reduce-scatter one's own part. The engines are real
and allocate what rank 0 of N would, so the memory is real; time is that of computation without
communication, and losses mean nothing. What NCCL itself holds on a GPU is not there.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Alone", "average_alone", "simulate"]


def simulate(ranks: int) -> None:
    """Make this process rank 0 of ``ranks``; to be called before Accelerator makes a group."""
    # A private module of torch's, and the only home of this store; torchtitan uses it too.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


class Alone:
    """DDP's communication hook in a world without peers: divides a bucket as an average would.

    ``storages`` are those of the buckets it was shown.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.storages: set[int] = set()


def average_alone(model: torch.nn.Module) -> None:
    """Let a DDP model finish its buckets without peers.

    DDP's reducer takes the reduced bucket from the collective's future, and the fake group's
    holds nothing (torch 2.13, comm.cpp: "expected the hook result is either a Tensor"). Other
    engines read the tensor itself and need nothing here.
    """
    if isinstance(model, DistributedDataParallel) and not model._comm_hooks:
        model.register_comm_hook(Alone(model.process_group.size()), _divide)


def _divide(alone, bucket):
    # Not annotated: DDP compares a hook's annotations with its types, and strings are not those.
    buffer = bucket.buffer().div_(alone.ranks)
    alone.storages.add(buffer.untyped_storage()._cdata)
    done = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(buffer)
    return done

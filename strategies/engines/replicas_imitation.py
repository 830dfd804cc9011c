"""DDP on tensors without storage: what a prediction puts in the place of its reducer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from strategies.books import Books
from strategies.engine import Imitation

if TYPE_CHECKING:
    from strategies.engine import Launch

__all__ = ["Reducerless"]


class Reducerless(Imitation):
    """DDP without its reducer, which is C++ and wants real bytes.

    What it adds to a step is known: one persistent buffer as large as the gradients, cut into
    buckets, and an all-reduce of each while backward runs.
    Source: torch/csrc/distributed/c10d/reducer.cpp (initialize_buckets); with
    ``gradient_as_bucket_view`` gradients live in the buckets.
    """

    def made(self, accelerator: Any, launch: Launch) -> None:
        """Without a GPU accelerate knows no kind of several ranks but MULTI_CPU."""
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import DistributedType

        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = DistributedType(launch.engine.file.kind)

    def stand_ins(self, books: Books) -> list[contextlib.AbstractContextManager[Any]]:
        stand_in = replicas_for(books)
        return [mock.patch.object(torch.nn.parallel, "DistributedDataParallel", stand_in)]


def replicas_for(books: Books) -> type:
    """A class to stand for DistributedDataParallel; its buckets are held in ``books``."""

    class DistributedDataParallel(torch.nn.Module):
        def __init__(self, module: Any, *given: Any, **more: Any) -> None:
            super().__init__()
            self.module, self.syncs = module, True
            self.among = _among(more.get("process_group"))
            trained = [p for p in module.parameters() if p.requires_grad]
            self.size = sum(p.numel() * p.element_size() for p in trained)
            if more.get("gradient_as_bucket_view"):
                return  # gradients are counted when they arrive
            self.free: Callable[[], None] = books.hold(
                "device", self.size, "c10d.Reducer", "buckets"
            )

        def forward(self, *given: Any, **more: Any) -> Any:
            if self.syncs and torch.is_grad_enabled():
                # An all-reduce is a reduce-scatter and an all-gather.
                books.work("backward", "overlapped", 2 * self.size, *self.among)
            return self.module(*given, **more)

        def register_comm_hook(self, *given: Any) -> None:
            raise NotImplementedError("a communication hook runs in DDP's reducer, which is C++")

        def _get_ddp_logging_data(self) -> dict[str, str]:
            return {"bucket_sizes": "0"}  # what is hidden there stands in the books already

        _comm_hooks = ()

        @contextlib.contextmanager
        def no_sync(self) -> Iterator[None]:
            before, self.syncs = self.syncs, False
            try:
                yield
            finally:
                self.syncs = before

    return DistributedDataParallel


def _among(group: Any) -> tuple[int, int]:
    """How many ranks average, and how far apart they are; (0, 1): all."""
    if group is None:
        return 0, 1
    ranks = torch.distributed.get_process_group_ranks(group)
    return len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1

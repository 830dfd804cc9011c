"""Adapter of DDP for predictions: replaces its C++ reducer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

from harness.planner.adapters.base import AllocationRecorder, TraceAdapter

if TYPE_CHECKING:
    from strategies.engine import RunContext


class DdpAdapter(TraceAdapter):
    """Adapter that runs DDP without its reducer, which is C++ and needs real bytes.

    The reducer's memory is known: one persistent buffer as large as the gradients, cut into
    buckets, and an all-reduce of each during backward. Source:
    torch/csrc/distributed/c10d/reducer.cpp (initialize_buckets); with ``gradient_as_bucket_view``
    gradients live in the buckets.

    In the second step's forward DDP rebuilds its buckets in the order in which gradients arrived.
    The old ones may still exist: ProcessGroupNCCL releases a collective's tensors after its
    watchdog, which polls every 100 ms, has seen the end and another collective begins. They are
    therefore counted as passing memory until the second step's first bucket is full. Source:
    torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (shelvesToUnstash_), reducer.cpp
    (rebuild_buckets).
    """

    def patches(
        self, launch: RunContext, recorder: AllocationRecorder
    ) -> list[contextlib.AbstractContextManager[Any]]:
        import torch

        replicas = replicas_for(recorder)
        return [mock.patch.object(torch.nn.parallel, "DistributedDataParallel", replicas)]

    def adapt_accelerator(self, accelerator: Any, launch: RunContext) -> None:
        """Set the launch file's distributed type; without a GPU accelerate sets MULTI_CPU."""
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import DistributedType

        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = DistributedType(launch.engine.file.kind)


def replicas_for(recorder: AllocationRecorder) -> type:
    """Return a replacement class of DistributedDataParallel that records its buckets in
    ``recorder``."""
    import torch

    class DistributedDataParallel(torch.nn.Module):
        def __init__(self, module: Any, *given: Any, **more: Any) -> None:
            super().__init__()
            self.module, self.syncs = module, True
            self.among = _among(more.get("process_group"))
            trained = [p for p in module.parameters() if p.requires_grad]
            self.size = sum(p.nbytes for p in trained)
            self.trained, self.old = trained, OldBuckets(recorder, self.size)
            if more.get("gradient_as_bucket_view"):
                return  # gradients are counted when they arrive
            self.free: Callable[[], None] = recorder.hold(
                "device", self.size, "c10d.Reducer", "buckets"
            )

        def forward(self, *given: Any, **more: Any) -> Any:
            if torch.is_grad_enabled():
                self.old.forward(self)
            if self.syncs and torch.is_grad_enabled():
                # An all-reduce is a reduce-scatter and an all-gather.
                recorder.work("backward", "overlapped", 2 * self.size, *self.among)
            return self.module(*given, **more)

        def register_comm_hook(self, *given: Any) -> None:
            raise NotImplementedError(
                "a communication hook runs in DDP's C++ reducer, which a prediction cannot trace"
            )

        def _get_ddp_logging_data(self) -> dict[str, str]:
            return {"bucket_sizes": "0"}  # the hidden bytes are recorded already

        _comm_hooks = ()

        @contextlib.contextmanager
        def no_sync(self) -> Iterator[None]:
            before, self.syncs = self.syncs, False
            try:
                yield
            finally:
                self.syncs = before

    return DistributedDataParallel


class OldBuckets:
    """DDP's buckets of the first step, while they exist together with the new ones."""

    def __init__(self, recorder: AllocationRecorder, size: int) -> None:
        self.recorder, self.size = recorder, size
        self.reduced = self.done = False

    def forward(self, ddp: Any) -> None:
        """Record the old buckets at the start of a forward pass with gradients."""
        import torch.distributed as dist

        if not self.reduced or self.done:
            self.reduced = self.reduced or ddp.syncs
            return
        self.done = True
        first = min(dist._DEFAULT_FIRST_BUCKET_BYTES, self.size)
        free = self.recorder.hold("passing", self.size, "c10d.Reducer", "buckets")
        arrived = 0

        def arrives(parameter: Any) -> None:
            nonlocal arrived
            before, arrived = arrived, arrived + parameter.nbytes * ddp.syncs
            if before < first <= arrived:
                free()
                for handle in handles:
                    handle.remove()

        handles = [p.register_post_accumulate_grad_hook(arrives) for p in ddp.trained]


def _among(group: Any) -> tuple[int, int]:
    """Return the number of ranks that average and the distance between them; (0, 1): all ranks."""
    import torch

    if group is None:
        return 0, 1
    ranks = torch.distributed.get_process_group_ranks(group)
    return len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1

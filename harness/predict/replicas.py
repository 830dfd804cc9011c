"""DistributedDataParallel without its reducer, which is C++ and wants real bytes.

What it adds to a step is known: one persistent buffer as large as the gradients, cut into
buckets, and an all-reduce of each while backward runs.
Source: torch/csrc/distributed/c10d/reducer.cpp (initialize_buckets); with
``gradient_as_bucket_view`` gradients live in the buckets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from harness.predict.trace import Tracer

__all__ = ["replicas_for"]


def replicas_for(tracer: Tracer, count_work: Any) -> type[torch.nn.Module]:
    """A class to stand for DistributedDataParallel; its buckets are held in ``tracer``.

    ``count_work`` is told of the bytes of gradients that an optimizer step reduces.
    """

    class DistributedDataParallel(torch.nn.Module):
        def __init__(self, module: torch.nn.Module, *given: Any, **more: Any) -> None:
            super().__init__()
            self.module, self.syncs = module, True
            trained = [p for p in module.parameters() if p.requires_grad]
            self.size = sum(p.numel() * p.element_size() for p in trained)
            if more.get("gradient_as_bucket_view"):
                return  # gradients are counted when they arrive
            self.free = tracer.hold("device", self.size, "c10d.Reducer", "buckets")

        def forward(self, *given: Any, **more: Any) -> Any:
            if self.syncs and torch.is_grad_enabled():
                count_work(self.size)
            return self.module(*given, **more)

        @contextlib.contextmanager
        def no_sync(self) -> Iterator[None]:
            before, self.syncs = self.syncs, False
            try:
                yield
            finally:
                self.syncs = before

    return DistributedDataParallel

"""Asynchronous copies of device tensors to host memory, with a bound on tensors in flight."""

from __future__ import annotations

from collections import deque
from typing import Any

MOST = 4
"""Number of tensors whose copies may be in flight at once."""


class AsyncHostCopy:
    """Copier of tensors to host memory on a ``stream`` of its own (None: the device has none), with
    at most ``MOST`` in flight: then the compute stream waits for the oldest copy.

    ``Tensor.record_stream`` would hold each tensor until its copy ends by the device's clock, while
    the host runs ahead and allocates (torch 2.13, c10/cuda, CUDACachingAllocator.cpp,
    ``process_events``). Here the held tensors follow from the order of calls, so a prediction,
    which has no streams, holds the same.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.held: deque[tuple[Any, Any]] = deque()

    def copy(self, source: Any, target: Any) -> None:
        """Begin to copy ``source`` to ``target`` in host memory; from host memory synchronously."""
        import torch

        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        if source.device.type == "cpu":
            return
        copied = None if self.stream is None else self.stream.record_event()
        self.held.append((source.detach(), copied))
        self.let_go(MOST)

    def let_go(self, keep: int = 0) -> None:
        """Release all but the last ``keep`` tensors; later computation waits for the copies of
        those released."""
        import torch

        while len(self.held) > keep:
            source, copied = self.held.popleft()
            if copied is not None:
                torch.cuda.current_stream(source.device).wait_event(copied)

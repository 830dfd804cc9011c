"""Copies of a device's tensors to host memory, beside what is computed."""

from __future__ import annotations

from collections import deque
from typing import Any

MOST = 4
"""Tensors whose copies are under way at a time."""


class Leaving:
    """Copies tensors to host memory on a stream of their own, and holds ``most`` of those that
    leave: before there are more, what computes waits for the oldest copy, and its memory is free.

    ``Tensor.record_stream`` would hold each until its copy is made, by the device's clock. The host
    asks for new memory long before that, for it runs ahead, and is given memory that was not used
    yet: up to all that leaves, and another amount each time (torch 2.13, c10/cuda,
    CUDACachingAllocator.cpp, ``process_events``). Here what is held follows from the order of the
    calls, so that a prediction, which has no streams, holds the same.

    Args:
        stream: of the copies; None where the device has none.
        most: tensors.
    """

    def __init__(self, stream: Any, most: int = MOST) -> None:
        self.stream, self.most = stream, most
        self.held: deque[tuple[Any, Any]] = deque()

    def copy(self, source: Any, target: Any) -> None:
        """Begin to copy ``source`` to ``target``, in host memory; where ``source`` is there too the
        copy is made now."""
        import torch

        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        if source.device.type == "cpu":
            return
        copied = None if self.stream is None else self.stream.record_event()
        self.held.append((source.detach(), copied))
        self.let_go(self.most)

    def let_go(self, keep: int = 0) -> None:
        """Hold the last ``keep`` tensors and no others: what is computed from now on comes behind
        the copies of these."""
        import torch

        while len(self.held) > keep:
            source, copied = self.held.popleft()
            if copied is not None:
                torch.cuda.current_stream(source.device).wait_event(copied)

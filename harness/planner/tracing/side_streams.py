"""Simulated CUDA streams, which give the current stream of each traced allocation.
CUDA's caching allocator keeps the memory of each stream apart. A trace runs nothing concurrently,
so every event is complete and no stream waits."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch


class Event:
    """Event that is always complete."""

    def __init__(self, **given: Any) -> None:
        """Accept the options of ``torch.cuda.Event``, and ignore them."""

    def record(self, stream: Any = None) -> Event:
        return self

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        """Do nothing: no work runs concurrently."""

    def synchronize(self) -> None:
        """Do nothing: no work runs concurrently."""


class Stream(torch.cpu.Stream):
    """Stream with a ``number``; 0 is the compute stream."""

    numbers = itertools.count()

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__()
        self.number = next(self.numbers)

    def record_event(self, event: Any = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        """Do nothing: no work runs concurrently."""


main = Stream()
_entered = [main]


def current(device: Any = None) -> Stream:
    """Return the stream on which this process allocates now."""
    return _entered[-1]


@contextlib.contextmanager
def inside(stream: Stream | None) -> Iterator[None]:
    """Make ``stream`` current inside the context; None changes nothing."""
    _entered.append(stream or current())
    try:
        yield
    finally:
        _entered.pop()

"""CUDA streams of a device without storage: which one is current, for allocations that a prediction
traces.

CUDA's caching allocator keeps the memory of each stream apart. A trace runs nothing beside anything
else, so that events have come and streams wait for nobody.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch


class Event:
    """An event that has come."""

    def __init__(self, **given: Any) -> None:
        """As ``torch.cuda.Event``, whose options do not matter here."""

    def record(self, stream: Any = None) -> Event:
        return self

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        """Nothing runs beside anything else."""

    def synchronize(self) -> None:
        """Nothing runs beside anything else."""


class Stream(torch.cpu.Stream):
    """A stream by its ``number``: 0 is the one that computes."""

    numbers = itertools.count()

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__()
        self.number = next(self.numbers)

    def record_event(self, event: Any = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        """Nothing runs beside anything else."""


main = Stream()
_entered = [main]


def current(device: Any = None) -> Stream:
    """The stream on which this process allocates now."""
    return _entered[-1]


@contextlib.contextmanager
def inside(stream: Stream | None) -> Iterator[None]:
    """While it lasts, ``stream`` is current; None changes nothing."""
    _entered.append(stream or current())
    try:
        yield
    finally:
        _entered.pop()

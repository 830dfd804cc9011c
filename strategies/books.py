"""Where a prediction's stand-in for an engine writes what no op of a traced training shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

__all__ = ["Books"]


class Books(Protocol):
    """Where an imitation records what no op of a traced training shows; the tracer of a prediction
    is one (``harness.predict.tracing.trace``)."""

    def hold(self, pool: str, size: int, op: str, category: str) -> Callable[[], None]:
        """Record ``size`` bytes of pool "device", "host" or "nvme" as held from now on, made by
        ``op`` (a name for the reader). Call the result to record that they are freed. Pool
        "passing" is the device's memory that no later step holds."""

    def pin(self, tensor: Any, pinned: bool = True) -> None:
        """Count a tensor in host memory as what it takes where it is ``pinned``
        (``strategies.sizes.pinned_block``), or, False, as its bytes after all."""

    def tag(self, category: str, tensors: Iterable[Any]) -> None:
        """Give tensors that live now their category, where they have none."""

    def move(self, category: str, source: str, target: str) -> int:
        """Count all of ``category`` that the trace has in pool ``source`` in pool ``target``
        instead, from the start of the trace on. Returns the bytes of it that are held now."""

    def work(self, phase: str, kind: str, size: int, group: int = 0, stride: int = 1) -> None:
        """Record ``size`` bytes moved in a phase of the step; kind is overlapped, host or nvme,
        ``group`` and ``stride`` say among which ranks (``harness.predict.speed.roofline.Work``)."""

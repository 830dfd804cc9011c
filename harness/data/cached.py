"""Samples in files that a model can take: read as they are asked for, one fetch ahead."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from harness.data.brought import moved
from strategies.subject import DataFacts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Cached"]


class Cached:
    """``read`` gives the sample of an index: "x" and what goes with it, in host memory. A fault in
    a file is raised by the fetch that asks for it."""

    def __init__(
        self,
        facts: DataFacts,
        read: Callable[[int], dict[str, Tensor]],
        device: torch.device | str,
    ) -> None:
        import torch

        self.facts, self.read, self.device = facts, read, torch.device(device)
        self._reader = ThreadPoolExecutor(1)
        self._coming: tuple[bytes, Future] | None = None

    def begin(self, indices: np.ndarray) -> None:
        """Files are read one fetch ahead (``expect``)."""

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        """See ``Dataset.fetch``."""
        if self._coming is None or self._coming[0] != indices.tobytes():
            self.expect(indices)
        # Always read by that thread: a trace's modes, which make up tensors, are of this one.
        rows = moved(self._coming[1].result(), self.device)
        self._coming = None
        return rows.pop("x"), rows

    def expect(self, indices: np.ndarray) -> None:
        """See ``Dataset.expect``."""
        self._coming = (indices.tobytes(), self._reader.submit(self._rows, indices))

    def _rows(self, indices: np.ndarray) -> dict[str, Tensor]:
        import torch

        each = [self.read(int(index)) for index in indices]
        return {name: torch.stack([row[name] for row in each]) for name in each[0]}

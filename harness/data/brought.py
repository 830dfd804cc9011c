"""Samples that a model brings itself: a few of them, in its own layout, in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from strategies.subject import DataFacts

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Brought:
    """``held`` has "x" and what goes with it, rows of samples; what a step takes is copied to
    ``device``. In host memory: a text of some models is megabytes a sample, and no trainer keeps
    its data on the GPU."""

    def __init__(
        self, facts: DataFacts, held: Mapping[str, Tensor], device: torch.device | str
    ) -> None:
        import torch

        self.facts, self.device = facts, torch.device(device)
        self.names = tuple(held)
        # Each an attribute: a CPU's meter leaves out what a dataset's attributes are.
        vars(self).update({f"held_{name}": tensor for name, tensor in held.items()})

    def begin(self, indices: np.ndarray) -> None:
        """Its samples are in host memory: what a step takes is copied as it is taken."""

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        """See ``Dataset.fetch``."""
        import torch

        chosen = torch.from_numpy(np.array(indices))
        rows = {name: getattr(self, f"held_{name}")[chosen] for name in self.names}
        rows = moved(rows, self.device)
        return rows.pop("x"), rows

    def expect(self, indices: np.ndarray) -> None:
        """Nothing to read."""


def moved(rows: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Rows from host memory on ``device``."""
    if device.type == "cuda":
        # Only a copy from pinned memory runs beside the device's work.
        return {n: t.pin_memory().to(device, non_blocking=True) for n, t in rows.items()}
    return {name: tensor.to(device) for name, tensor in rows.items()}


# ---- cached ----
# Samples in files that a model can take: read as they are asked for, one fetch ahead.


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

"""Datasets of models that bring their own samples: in host memory, or read from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from strategies.subject import DataFacts

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Brought:
    """Dataset in host memory.

    ``held`` has "x" and its conditions, as rows of samples. The samples of a step are copied to
    ``device``. They stay in host memory because the text of some models takes megabytes per sample,
    and trainers do not keep their data on the GPU.
    """

    def __init__(
        self, facts: DataFacts, held: Mapping[str, Tensor], device: torch.device | str
    ) -> None:
        import torch

        self.facts, self.device = facts, torch.device(device)
        self.names = tuple(held)
        # Attributes, because a CPU's meter excludes a dataset's attributes.
        vars(self).update({f"held_{name}": tensor for name, tensor in held.items()})

    def begin(self, indices: np.ndarray) -> None:
        """Do nothing: a sample is copied when it is fetched."""

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        """See ``Dataset.fetch``."""
        import torch

        chosen = torch.from_numpy(np.array(indices))
        rows = {name: getattr(self, f"held_{name}")[chosen] for name in self.names}
        rows = moved(rows, self.device)
        return rows.pop("x"), rows

    def expect(self, indices: np.ndarray) -> None:
        """Do nothing: there are no files to read."""


def moved(rows: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy rows from host memory to ``device``."""
    if device.type == "cuda":
        # Only a copy from pinned memory overlaps with the device's work.
        pinned = {name: tensor.pin_memory() for name, tensor in rows.items()}
        return {name: tensor.to(device, non_blocking=True) for name, tensor in pinned.items()}
    return {name: tensor.to(device) for name, tensor in rows.items()}


# ---- samples in files ----


class Cached:
    """Dataset that reads samples from files, one fetch ahead.

    ``read`` returns the sample of an index: "x" and its conditions, in host memory. An error in a
    file is raised by the fetch that needs it.
    """

    def __init__(
        self,
        facts: DataFacts,
        read: Callable[[int], dict[str, Tensor]],
        device: torch.device | str,
    ) -> None:
        import torch

        self.facts, self.read, self.device = facts, read, torch.device(device)
        self._reader = ThreadPoolExecutor(1)
        self._coming: tuple[bytes, Future[Any]] | None = None

    def begin(self, indices: np.ndarray) -> None:
        """Do nothing: files are read one fetch ahead (``expect``)."""

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        """See ``Dataset.fetch``."""
        if self._coming is None or self._coming[0] != indices.tobytes():
            self.expect(indices)
        # Always read by that thread: a trace's modes, which create fake tensors, are of this
        # thread.
        assert self._coming is not None
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

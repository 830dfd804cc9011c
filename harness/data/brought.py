"""Dataset of a model that brings its own samples, in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

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

"""Dataset indices on the device: a whole step's in one copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Indices", "on_device"]


def on_device(values: np.ndarray, device: torch.device | str) -> Tensor:
    """A copy on ``device``; to a GPU from pinned memory, for only such a copy runs beside the work
    that the device still has."""
    import torch

    tensor, device = torch.from_numpy(np.array(values)), torch.device(device)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Indices:
    """Indices on the device: a step's at once, so that its micro batches wait for no copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._left, self._there = np.empty(0, np.int64), None

    def begin(self, indices: np.ndarray) -> None:
        """The indices that the next calls of ``take`` will ask for, one after the other."""
        self._left, self._there = np.array(indices), on_device(indices, self.device)

    def take(self, indices: np.ndarray) -> Tensor:
        """These indices on the device, int64 [n]; others than were announced are copied now."""
        count = len(indices)
        if self._there is None or not np.array_equal(self._left[:count], indices):
            return on_device(indices, self.device)
        chosen = self._there[:count]
        self._left, self._there = self._left[count:], self._there[count:]
        return chosen

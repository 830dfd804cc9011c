"""Autocast for functions that torch's autocast does not cover. Imports torch."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the type to which autocast casts a product's operands on the device of ``tensor``.

    None if autocast is off. Every device that is not the CPU counts as CUDA, because a prediction's
    simulated GPU has another type.
    """
    kind = "cpu" if tensor.device.type == "cpu" else "cuda"
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

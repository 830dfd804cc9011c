"""Autocast, for functions that it does not know.

Imports torch: import it only where it is there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The type to which autocast casts operands of products beside ``tensor``; None where it is
    off. A device that is not the CPU is asked as CUDA: a prediction's GPU has a type of its own."""
    kind = "cpu" if tensor.device.type == "cpu" else "cuda"
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

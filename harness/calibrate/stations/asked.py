"""What a station is asked for, and how it takes time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Asked", "reason", "seconds_of"]

WINDOWS = {"cpu": (0.0005, 1.0), "cuda": (0.2, 1.2)}
"""Seconds of a window of equal calls, and of all windows. Other work of the machine hits a CPU, and
threads that wait for one another most: of many short windows it leaves some alone. A GPU must run
long enough to take its clock under load."""
SMALL = (0.0002, 0.02)
LEAST_WINDOWS = 3


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A device, and whether small shapes will do: a rehearsal, whose numbers mean nothing."""

    device: torch.device
    small: bool = False
    ranks: int = 1

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def random(self, *shape: int, dtype: torch.dtype = torch.float32, **more: Any) -> torch.Tensor:
        """Normal numbers: products of zeros or ones take less power, and so run faster."""
        made = torch.randn(*shape, device=self.device, dtype=torch.float32)
        return made.to(dtype).requires_grad_(more.get("requires_grad", False))


def seconds_of(work: Callable[[], Any], asked: Asked) -> float:
    """Seconds of one call: the best of several windows of calls back to back."""
    least, whole = SMALL if asked.small else WINDOWS[asked.device.type]
    work()
    once = min(_window(work, asked, 1) for _ in range(LEAST_WINDOWS))
    calls = max(1, math.ceil(least / max(once, 1e-7)))
    best, spent, windows = once, 0.0, 0
    while spent < whole or windows < LEAST_WINDOWS:
        took = _window(work, asked, calls)
        best, spent, windows = min(best, took / calls), spent + took, windows + 1
    return best


def _window(work: Callable[[], Any], asked: Asked, calls: int) -> float:
    asked.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    asked.synchronize()
    return time.perf_counter() - start


def reason(error: Exception) -> str:
    """The first line of what a library raised."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {first}"[:200]

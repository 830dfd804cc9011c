"""What each operation of a step costs: FLOPs, bytes and seconds; and the device's own ceilings."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.memory.free_ops import is_free
from harness.memory.portrait import OpCost
from strategies.evidence.flops import formulas

__all__ = ["Costs", "bandwidth", "peak_flops"]

SIZE = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}
TRIES = 5


class Costs(TorchDispatchMode):
    """Counts and times every operation that moves data while active.

    FLOPs of products follow ``strategies.evidence.flops``; other operations count one an
    element of their largest operand or result (a list of tensors is one). Bytes are those of
    operands and results, each once: what must cross the memory bus if nothing stays in cache. On
    a GPU each operation is waited for, so that seconds are its own (and the sum is longer than
    the step).
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        super().__init__()
        self.phase, self.synchronize = "forward", synchronize
        self.costs: dict[tuple[str, str], OpCost] = {}
        self.formulas = formulas()

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.synchronize()
        start = time.perf_counter()
        out = func(*args, **kwargs)
        self.synchronize()
        seconds = time.perf_counter() - start
        if func.namespace == "aten" and not is_free(func):
            name = func._schema.name.partition("::")[2]
            self._book(name, func, args, kwargs, out, seconds)
        return out

    def _book(self, name: str, func: Any, args: Any, kwargs: Any, out: Any, seconds: float) -> None:
        key = (name, self.phase)
        cost = self.costs.setdefault(
            key, OpCost(op=name, phase=self.phase, calls=0, flops=0, bytes=0, seconds=0.0)
        )
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        formula = self.formulas.get(func._overloadpacket)
        cost.calls += 1
        cost.seconds += seconds
        cost.bytes += sum(t.numel() * t.element_size() for t in (*operands, *results))
        if formula is not None:
            cost.flops += formula(*args, **kwargs, out_val=out)
        else:
            cost.flops += max(map(_elements, (*args, *kwargs.values(), out)), default=0)

    def table(self) -> list[OpCost]:
        """The costs, the longest first."""
        return sorted(self.costs.values(), key=lambda cost: -cost.seconds)


def _elements(value: Any) -> int:
    return sum(t.numel() for t in tree_leaves(value) if isinstance(t, torch.Tensor))


def peak_flops(device: torch.device, dtype: torch.dtype, synchronize: Callable[[], None]) -> float:
    """FLOP/s of the best of a few large matrix products: what this device reaches, not its label.

    The side is 1024 on a CPU and 8192 on a GPU, where smaller products leave it idle.
    """
    side = SIZE.get(device.type, 1024)
    a = torch.ones(side, side, device=device, dtype=dtype)
    return 2 * side**3 / _best(lambda: a @ a, synchronize)


def bandwidth(device: torch.device, synchronize: Callable[[], None]) -> float:
    """Bytes a second of the best of a few large copies, reads and writes both counted."""
    size = COPY_BYTES.get(device.type, 2**27)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), synchronize)


def _best(work: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    seconds = []
    for _ in range(TRIES):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)

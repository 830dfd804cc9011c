"""Collect the memory breakdown of a run from a few more steps, each traced in another way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.memory.dissect.timeline import Stack, TimelineTracer
from harness.memory.memory_breakdown import MemoryBreakdown, OpCost
from harness.memory.op_facts import is_free
from harness.memory.traced_step import following, register_living
from strategies.evidence import states
from strategies.evidence.flops import formulas

# ---- operation costs ----


SIZE = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}
TRIES = 5


class Costs(TorchDispatchMode):
    """Counts and times every operation that moves data while active.

    FLOPs of products follow ``strategies.evidence.flops``. Other operations count one per element
    of their largest operand or result (a list of tensors is one). Bytes are those of operands and
    results, each once: the least memory traffic without a cache. On a GPU each operation is
    synchronized, so that its seconds are its own, and the sum is longer than the step.
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
        """Return the costs, the longest first."""
        return sorted(self.costs.values(), key=lambda cost: -cost.seconds)


def _elements(value: Any) -> int:
    return sum(t.numel() for t in tree_leaves(value) if isinstance(t, torch.Tensor))


def peak_flops(device: torch.device, dtype: torch.dtype, synchronize: Callable[[], None]) -> float:
    """Return the FLOP/s of the best of a few large matrix products: the device's real peak.

    The side is 1024 on a CPU and 8192 on a GPU, which smaller products do not saturate.
    """
    side = SIZE.get(device.type, 1024)
    a = torch.ones(side, side, device=device, dtype=dtype)
    return 2 * side**3 / _best(lambda: a @ a, synchronize)


def bandwidth(device: torch.device, synchronize: Callable[[], None]) -> float:
    """Return the bytes per second of the best of a few large copies; reads and writes both
    count."""
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


OPS = 40


def take(run: Any) -> MemoryBreakdown:
    """Return the breakdown of this rank of a ``harness.worker.loop.Run``, from its next two steps.
    Every rank must call it."""
    device, synchronize = run.accelerator.device, run.meter.synchronize
    stack = Stack(run.module)
    tracer = TimelineTracer(run, device.type, stack)
    tracer.leave_out(run.baseline)
    register_living(tracer, run)
    with stack.watching(), following(tracer, run), tracer:
        run.step()
    tracer.catch_up()
    costs = Costs(synchronize)
    with run.engine.phase_hooks(run, costs.enter), costs:
        run.step()
    dtype = getattr(torch, states.compute_dtype(run))
    spec, subject = run.resolved.spec, run.resolved.subject
    return MemoryBreakdown(
        recipe=str(run.resolved.recipe),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=str(dtype).removeprefix("torch."),
        global_batch=spec.global_batch,
        micro_batch=run.resolved.micro_batch,
        processes=spec.processes,
        model=spec.model,
        tokens=subject.survey.tokens,
        hidden=subject.survey.width,
        depth=subject.survey.depth,
        parameters=subject.parameters,
        timeline=tracer.timeline(),
        lumps=tracer.lumps(),
        kept=tracer.kept(),
        ops=costs.table()[:OPS],
        peak_flops=peak_flops(device, dtype, synchronize),
        bandwidth=bandwidth(device, synchronize),
    )

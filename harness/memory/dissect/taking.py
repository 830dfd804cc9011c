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
        if func.namespace != "aten" or is_free(func):
            return out
        name = func._schema.name.partition("::")[2]
        new = OpCost(op=name, phase=self.phase, calls=0, flops=0, bytes=0, seconds=0.0)
        cost = self.costs.setdefault((name, self.phase), new)
        formula = self.formulas.get(func._overloadpacket)
        cost.calls += 1
        cost.seconds += seconds
        cost.bytes += sum(t.numel() * t.element_size() for t in _tensors((args, kwargs, out)))
        if formula is not None:
            cost.flops += formula(*args, **kwargs, out_val=out)
        else:
            each = (sum(t.numel() for t in _tensors(v)) for v in (*args, *kwargs.values(), out))
            cost.flops += max(each, default=0)
        return out


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def ceilings(
    device: torch.device, dtype: torch.dtype, synchronize: Callable[[], None]
) -> tuple[float, float]:
    """Return the device's real peaks: FLOP/s of a few large matrix products, and bytes per second
    of a few large copies, of which reads and writes both count."""
    side = SIZE.get(device.type, 1024)
    a = torch.ones(side, side, device=device, dtype=dtype)
    flops = 2 * side**3 / _best(lambda: a @ a, synchronize)
    size = COPY_BYTES.get(device.type, 2**27)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return flops, 2 * size / _best(lambda: target.copy_(source), synchronize)


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
    flops, bandwidth = ceilings(device, dtype, synchronize)
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
        ops=sorted(costs.costs.values(), key=lambda cost: -cost.seconds)[:OPS],
        peak_flops=flops,
        bandwidth=bandwidth,
    )

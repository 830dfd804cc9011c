"""Trace of one recipe: its real set-up and steps on tensors without storage, and their peaks."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from harness.memory.record import (
    ALLOCATED,
    Record,
    beyond_kinds,
    peak,
    phase_peaks,
    running,
)
from harness.memory.traced_step import following
from harness.phases import planned
from harness.planner import overhead
from harness.planner.adapters import adapter_of
from harness.planner.adapters.base import TraceAdapter
from harness.planner.overhead import USUAL, NoTrace, of_operations
from harness.planner.tracing import side_streams, streams, world
from harness.planner.tracing.allocator import replay
from harness.planner.tracing.cuda_calls import cuda_like
from harness.planner.tracing.op_cache import OpCache
from harness.planner.tracing.shortcuts import (
    Shortcuts,
    first_pieces,
    stays_in_backward,
    storageless,
)
from harness.planner.tracing.trace import Counter, StoragelessTracer
from harness.prediction import Prediction, Work
from harness.resolve import Resolved
from harness.sampling.measure import Drawing
from harness.worker import setup
from harness.worker.loop import Log, Run


def denoised_samples(subject: Any) -> int:
    """Return the samples of one denoising pass: guidance takes two, or one if the model has the
    guidance scale as an input."""
    config = {**subject.family.defaults, **subject.config} if hasattr(subject, "family") else {}
    return 1 if config.get("guidance_embeds") else 2


def denoised(run: Run, tracer: StoragelessTracer) -> int:
    """Return the device's peak bytes in one forward pass without gradients.
    A training's state stays allocated. The pass is removed from the trace."""
    gc.collect()
    subject, record, first = run.subject, tracer.record, len(tracer.record.events)
    count = denoised_samples(subject)

    def ignored(*_: object) -> None:
        """Count no work: none of it is a step's."""

    uncounted = mock.patch.multiple(tracer, witness=ignored, moved=ignored)
    scopes = run.engine.trace_points(run).scopes
    with uncounted, torch.no_grad(), tracer.watching(scopes):
        x, t_B, conditions = subject.example(run.accelerator.device)
        x, t_B, *given = (torch.cat([one] * count) for one in (x, t_B, *conditions.values()))
        inputs = dict(zip(conditions, given, strict=True))
        subject.predict(run.model, run.cut(x), t_B, inputs)
    most = max(running(record, "device")[first:], default=0)
    tracer.drop_from(first)
    return most


NVME = "nvme"
STEPS = 2
"""Traced optimizer steps: the first makes the optimizer's state, the second is like all later
ones."""


def simulate(resolved: Resolved, kind: str = USUAL, rank: int = 0) -> Prediction:
    """Trace the training of ``rank`` on a card of that ``kind``, and return its prediction."""
    tracer, counter, steady_from = trace_training(resolved, kind=kind, rank=rank)
    return summary(resolved, tracer.record, counter, steady_from, denoising=tracer.denoising)


def trace_training(
    resolved: Resolved, kind: str = USUAL, rank: int = 0
) -> tuple[StoragelessTracer, Counter, int]:
    """Trace the set-up and ``STEPS`` optimizer steps of ``rank``.
    The result has the tracer, the counter, and the first event of the last step."""
    return trace_bordered(resolved, kind, rank, watch=False)[:3]


def trace_bordered(
    resolved: Resolved, kind: str = USUAL, rank: int = 0, *, watch: bool = True
) -> tuple[StoragelessTracer, Counter, int, list[streams.Border]]:
    """Trace as ``trace_training`` does, and return the block boundaries too (empty without
    ``watch``)."""
    resolved.subject.survey.idle  # noqa: B018 (survey now, so that its tensors are not in the trace)
    adapter = adapter_of(resolved.launch.engine, rank)
    on_gpu, parts = resolved.spec.device == "cuda", resolved.launch.layout.tensor
    device, neighbours = world.GPU if on_gpu else "cpu", (parts, 1) if parts > 1 else None
    counter = Counter(device, "cpu", adapter.overlapped_phases(resolved.launch), neighbours)
    # Of the device, which is the CPU without a GPU; with one, also of the host.
    tracer = StoragelessTracer(
        {world.GPU: "device", "cpu": "host"} if on_gpu else {"cpu": "device"},
        temporary=kernel_scratch if on_gpu else gloo_scratch,
        witness=counter.see,
        moved=counter.add,
        shapes_in=adapter.shapes_in,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(world.world(resolved, adapter))
        for patch in (storageless(), *adapter.patches(resolved.launch, tracer)):
            stack.enter_context(patch)
        if on_gpu:
            stack.enter_context(cuda_like(kind))
            emptied, events = tracer.record.emptied, tracer.record.events
            empty = mock.patch.object(
                torch.cuda, "empty_cache", lambda: emptied.append(len(events))
            )
            stack.enter_context(empty)
            stack.enter_context(_streams(tracer))
        if resolved.spec.processes > 1:
            stack.enter_context(stays_in_backward(Shortcuts()))
        stack.enter_context(first_pieces())
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        tracer.op_cache = OpCache(fake)
        stack.enter_context(tracer)
        borders: list[streams.Border] = []
        first = _take(resolved, adapter, tracer, counter, borders if watch else None)
        tracer.disbelieve()
    return tracer, counter, first, borders


def _take(
    resolved: Resolved,
    adapter: TraceAdapter,
    tracer: StoragelessTracer,
    counter: Counter,
    borders: list[streams.Border] | None,
) -> int:
    """Set up and take ``STEPS`` optimizer steps, or draw one batch, which makes nothing that a
    second one would reuse; return the first event of the last."""
    run, first, sampling = _prepare(resolved, adapter, tracer), 0, resolved.spec.sampling
    finish = adapter.prepared(run, tracer)
    watch = borders is not None and not sampling
    noting = streams.bordered(run, borders, tracer.record) if watch else None
    with noting or contextlib.nullcontext():
        for _ in range(1 if sampling else STEPS):
            first = _step(run, tracer, counter)
    finish()
    if denoises(resolved) and not sampling:
        tracer.denoising = denoised(run, tracer)
    return first


def denoises(resolved: Resolved) -> bool:
    """Return whether the row's phases have a denoising pass that is traced."""
    return "validate" in planned(resolved.spec.phases) and "stages" not in resolved.launch.traits


@contextlib.contextmanager
def _streams(tracer: StoragelessTracer) -> Iterator[None]:
    """Replace torch.cuda's streams, which do not exist without a GPU.
    Ops on a side stream run beside the computation and allocate from pools of that stream. Waits
    for a stream end at once."""

    @contextlib.contextmanager
    def on(stream: side_streams.Stream | None) -> Iterator[None]:
        with side_streams.inside(stream):
            if side_streams.current() is side_streams.main:
                yield
            else:
                with tracer.beside():
                    yield

    with (
        mock.patch.object(torch.cuda, "Stream", side_streams.Stream),
        mock.patch.object(torch.cuda, "current_stream", side_streams.current),
        mock.patch.object(torch.cuda, "stream", on),
    ):
        yield


def _prepare(resolved: Resolved, adapter: TraceAdapter, tracer: StoragelessTracer) -> Run:
    accelerator, scratch = world.make_accelerator(resolved, adapter), Path("never-written")
    if resolved.spec.sampling:
        # Without a weights file: a prediction needs no values of weights.
        plain = dataclasses.replace(resolved, weights="")
        return setup.prepare(plain, None, accelerator, scratch, tracer.enter, Drawing)
    feed = setup.build_feed(resolved, accelerator)
    if resolved.spec.device == "cpu":
        # The data is in the baseline of a CPU's resident-memory meter.
        tracer.leave_out(vars(feed.dataset).values())
    return setup.prepare(resolved, feed, accelerator, scratch, tracer.enter)


def _step(run: Run, tracer: StoragelessTracer, counter: Counter) -> int:
    """Take one step, recorded by ``tracer`` and ``counter``; return its first event."""
    gc.collect()  # garbage in cycles would be freed at an arbitrary event
    tracer.know(run)
    counter.begin()
    first = len(tracer.record.events)
    stepped: list[bool] = []
    handle = register_optimizer_step_post_hook(lambda *_: stepped.append(True))
    try:
        with following(tracer, run):
            run.step()
            run.log = Log()
    finally:
        handle.remove()
    if not stepped and not run.resolved.spec.sampling:  # a loss scale assumed to overflow
        raise NoTrace("no optimizer stepped, so that its state is not in the trace")
    tracer.know(run)
    return first


SOFTMAX = (torch.ops.aten._safe_softmax.default, torch.ops.aten._softmax_backward_data.default)


def kernel_scratch(func: Any, args: Any, out: Any) -> int:
    """Return the bytes that a CUDA kernel of this op holds while it runs."""
    name = str(func)
    if func is torch.ops.aten.isinf.default and args[0].device.type == world.GPU:
        # abs() and a comparison: DeepSpeed calls it on all float16 gradients that ZeRO-3 keeps.
        # Source: torch 2.13, aten/src/ATen/native/TensorCompare.cpp.
        return args[0].nbytes
    if func in SOFTMAX and args[0].device.type == world.GPU:
        # A mask of bytes in forward (isneginf), and the gradient times the output in backward.
        # Source: torch 2.13, native/transformers/attention.cpp (_safe_softmax), cuda/SoftMax.cu.
        return args[0].numel() if func is SOFTMAX[0] else args[0].nbytes
    if "attention" not in name:
        return 0
    return overhead.scratch(name, [a.shape for a in args if isinstance(a, torch.Tensor)])


def gloo_scratch(func: Any, args: Any, out: Any) -> int:
    """Return the bytes that gloo holds during this op: its reduce-scatter copies the input."""
    if func.namespace != "c10d" or "reduce_scatter" not in func._schema.name:
        return 0
    tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
    return max((t.untyped_storage().nbytes() for t in tensors), default=0)


def summary(
    resolved: Resolved, record: Record, counter: Counter, steady_from: int, **more: Any
) -> Prediction:
    """Return the prediction of a trace, with the allocator's peaks for a GPU."""
    on_gpu = resolved.spec.device == "cuda"
    buckets, live = resolved.launch.engine.buckets, running(record, "device")
    bubble, chain = adapter_of(resolved.launch.engine).bubble_fraction, []
    if bubble:  # a pipeline's waits
        asked = {"count": bubble.denominator, "group": bubble.numerator + 1}
        chain = [Work(phase="", kind="chain", dtype="", flops=0, bytes=0, **asked)]
    return Prediction(
        recipe=str(resolved.recipe),
        device=resolved.spec.device,
        method="trace",
        buckets=buckets,
        # From the first phase on, because opening the data is not part of the training.
        # On a CPU the peak is compared with resident memory, which has both pools.
        peak=peak(record, "device" if on_gpu else None, record.marks[0][0]),
        steady=peak(record, "device", steady_from),
        beyond=phase_peaks(record, "device", beyond_kinds(buckets), steady_from),
        host=peak(record, "host") if on_gpu else None,
        host_steady=peak(record, "host", steady_from),
        nvme=sum(s.size for s in record.storages if s.pool == NVME and s.freed_in is None),
        between=live[steady_from - 1],
        phases=phase_peaks(record, "device"),
        work=[*counter.work(), *chain],
        attention=of_operations(storage.op for storage in record.storages) if on_gpu else [],
        **(pooled(list(record.pool_events(ALLOCATED))) if on_gpu else {}),
        **more,
    )


def pooled(events: list[tuple[int, int, int, int]]) -> dict[str, int]:
    """Return the peaks of CUDA's allocator for allocations in order; ``least``: the smallest limit,
    within 1 %, under which every allocation still succeeds."""
    plain, growing = replay(events), replay(events, expandable=True)
    low, least = plain.allocated, plain.reserved
    while least - low > least // 100:
        middle = (low + least) // 2
        if replay(events, limit=middle).fits:
            least = middle
        else:
            low = middle
    return {
        "allocated": plain.allocated,
        "reserved": plain.reserved,
        "reserved_expandable": growing.reserved,
        "least": least,
    }

"""What the tracer of tensor storage makes of what a library allocates by itself."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from conftest import highest
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from harness.memory import op_facts
from harness.memory import tracer as tracer_module
from harness.memory.dissect.taking import Costs
from harness.memory.tracer import Tracer
from harness.planner.tracing.trace import Counter
from strategies.inventory import AllocationScope


class Library:
    """Flattens gradients into a bucket, and hands them to a collective that copies them."""

    def reduce(self) -> tuple[torch.Tensor, torch.Tensor]:
        bucket = torch.cat([torch.ones(96), torch.ones(32)])
        with _disable_current_modes():  # C++ allocates where no dispatch mode looks
            copy = bucket.clone()
        return bucket, copy.split(64)[0]


@pytest.mark.parametrize("phases", [(), ("backward",), ("optimizer",)])
def test_a_maker_names_what_it_makes_and_not_what_cpp_made(phases):
    tracer = Tracer({"cpu": "device"})
    tracer.enter("backward")
    with tracer.watching([AllocationScope(Library, "reduce", "buckets", phases)]), tracer:
        kept = Library().reduce()
    assert len(kept) == 2
    named = {s.op: s.category for s in tracer.record.storages if s.size == 4 * 128}
    bucket = None if phases == ("optimizer",) else "buckets"
    assert named == {"aten.cat.default": bucket, "aten.split.Tensor": None}


@pytest.mark.parametrize("waited", [True, False])
def test_what_a_thread_still_held_of_a_collective_is_no_part_of_a_peak(waited, monkeypatch):
    """gloo's threads let go a moment after ``wait()``: they get their turn before a maximum."""
    held, turn = [], threading.Event()
    thread = threading.Thread(target=lambda: (turn.wait(), held.clear()))
    monkeypatch.setattr(tracer_module, "pause", lambda: (turn.set(), thread.join()))
    tracer = Tracer({"cpu": "device"})
    thread.start()
    with tracer:
        held.append(torch.ones(512))
        if waited:
            tracer._wait()
        small = torch.ones(128)
    turn.set()
    thread.join()
    assert small.numel() == 128
    sizes = [sign * tracer.record.storages[i].size for sign, i in tracer.record.events]
    peak = max(itertools.accumulate(sizes))
    assert peak == 4 * (512 if waited else 640)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_in_four_bits_holds_its_weight_turned_back(dtype):
    """By torch's profiler, which sees what is allocated within the one operation."""
    pytest.importorskip("bitsandbytes")
    from strategies.adapters.quantised_base import pack

    whole, x = torch.nn.Linear(512, 1024, dtype=dtype), torch.randn(64, 512, dtype=dtype)
    own = peak_of(whole, x) - 64 * 1024 * dtype.itemsize
    layer = pack(whole)
    state = layer.weight.quant_state
    told = (x, layer.weight, state.shape, state.absmax, state.blocksize)
    scratch = op_facts.scratch("bitsandbytes.gemm_4bit.default", told)
    assert scratch == pytest.approx(peak_of(layer, x) - own, rel=0.01)


def peak_of(layer, x) -> int:
    """Bytes allocated at the fullest instant of ``layer(x)``."""
    with torch.no_grad():
        layer(x)  # tables are made once
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            out = layer(x)
    assert out.shape == (64, 1024)
    return highest(prof)


@pytest.mark.parametrize(("registered", "taken"), [(False, 32768), (True, 20000)])
def test_what_torch_pinned_for_a_gpu_takes_whole_blocks(registered, taken, monkeypatch):
    """What a strategy registered itself takes as much as it has; each before a step and in one."""
    monkeypatch.setattr(torch.UntypedStorage, "is_pinned", lambda self: self.nbytes() == 20000)
    before, tracer = torch.ones(5000), Tracer({"cpu": "device"})
    before.untyped_storage().registered = registered
    tracer.places = None  # a GPU's run: tensors' devices tell
    tracer.see(before, "before")
    with tracer:
        later, small = torch.ones(5000), torch.ones(100)
    assert later.numel() and small.numel()
    assert [s.size for s in tracer.record.storages] == [taken, 32768, 400]


# ---- views and allocations are no work ----


FREE = [
    *(torch.empty_like, lambda x: x.new_empty(7), lambda x: torch.ops.aten._unsafe_view(x, [24])),
    *(lambda x: x.split([1, 3]), lambda x: x[:1].expand(9, 6), lambda x: torch.empty(0).set_(x)),
]


class Told(TorchDispatchMode):
    """Shows every op to a counter, as a trace does."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter("cpu", "cpu")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.counter.see("forward", func, args, out)
        return out


@pytest.mark.parametrize("free", FREE)
def test_views_and_allocations_are_no_work(free):
    x = torch.zeros(4, 6)
    with Costs(lambda: None) as costs, Told() as told:
        free(x)
    assert not told.counter.work() and not costs.costs


def test_a_copy_is_work():
    x = torch.zeros(4, 6)
    with Costs(lambda: None) as costs, Told() as told:
        torch.empty_like(x).copy_(x)
    assert [one.op for one in costs.costs.values()] == ["copy_"]
    assert [one.kind for one in told.counter.work()] == ["memory"]


def test_an_optimizer_s_fused_step_is_work_though_it_returns_nothing():
    """It reads the weight, its gradient and two moments, and writes them: 8 x 4 bytes each."""
    weight = torch.zeros(1000, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=True)
    for _ in range(2):  # the first step makes the state
        weight.grad = torch.ones(1000)
        with Told() as told:
            optimizer.step()
    sizes = [one.bytes for one in told.counter.work()]
    assert max(sizes) == pytest.approx(32_000, rel=0.01)

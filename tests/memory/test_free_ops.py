"""Views and allocations are no work, to those who measure ops and to those who predict them."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.memory.dissect.taking import Costs
from harness.planner.tracing.trace import Counter

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
    assert not told.counter.work() and not costs.table()


def test_a_copy_is_work():
    x = torch.zeros(4, 6)
    with Costs(lambda: None) as costs, Told() as told:
        torch.empty_like(x).copy_(x)
    assert [one.op for one in costs.table()] == ["copy_"]
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

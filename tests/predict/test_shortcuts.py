"""The short ways through a large world change neither memory nor work, and are short."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import predictions
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.planner.tracing.shortcuts import Shortcuts
from harness.planner.tracing.trace import StoragelessTracer
from harness.spec import Spec

pytestmark = pytest.mark.thorough

# Twelve ranks: most sizes of a DiT are no multiple, so that pieces are short, empty and padded.
SPEC = Spec(
    recipe="",
    model="DiT-T/8:depth=2",
    data="synthetic",
    global_batch=12,
    processes=12,
    device="cuda",
)
RECIPES = ["zero3+bf16+checkpoint", "zero3_offload+bf16"]


def test_a_prediction_is_the_same_to_the_byte_without_shortcuts(tmp_path):
    specs = [dataclasses.asdict(dataclasses.replace(SPEC, recipe=recipe)) for recipe in RECIPES]
    cases = [{**spec, "shortcuts": short} for spec in specs for short in (True, False)]
    found = predictions(cases, tmp_path)
    for recipe, short, long in zip(RECIPES, found[::2], found[1::2], strict=True):
        assert short["method"] == "trace", short["reason"]
        for one in (short, long):
            one["work"].sort(key=str)
        assert short == long, recipe


class Cut:
    """What DeepSpeed does to a buffer for ``ranks`` ranks, and how many ops a trace sees of it."""

    def __init__(self, ranks: int) -> None:
        self.ops, self.ranks = 0, ranks
        tracer = StoragelessTracer({"cpu": "device"}, witness=self.count)
        with Shortcuts(), FakeTensorMode(), tracer:
            whole = torch.zeros(3 * ranks - 1)
            slices = [whole[3 * rank : 3 * rank + 3] for rank in range(ranks)]
            pieces = [whole.narrow(0, 3 * rank, 2) for rank in range(ranks)]
            self.joined = torch.cat(slices + pieces)
            self.chunks = torch.chunk(self.joined[: 2 * ranks], ranks)
            self.lengths = {len(piece) for piece in slices}, {len(piece) for piece in pieces}
        self.sizes = [storage.size for storage in tracer.record.storages]

    def count(self, *given) -> None:
        self.ops += 1


def test_ops_do_not_grow_with_the_world():
    small, large = Cut(16), Cut(1024)
    assert large.ops == small.ops < 20
    assert large.lengths == ({2, 3}, {2}) and len(large.chunks) == 1024
    assert len(large.joined) == 5 * 1024 - 1
    assert large.sizes == [4 * (3 * 1024 - 1), 4 * (5 * 1024 - 1)]


def test_what_the_short_way_cannot_answer_goes_the_long_way():
    with Shortcuts():
        whole = torch.arange(20.0)
        assert [len(p) for p in torch.chunk(whole, 3)] == [7, 7, 6]
        assert whole[::2].tolist() == whole.tolist()[::2]
        assert whole[-3:].tolist() == [17.0, 18.0, 19.0]
        square, grown = whole.view(4, 5), whole.clone().requires_grad_()
        assert square[1:3].shape == (2, 5) and square.narrow(1, 2, 3).shape == (4, 3)
        assert torch.cat([square] * 9).shape == (36, 5)
        assert torch.cat([grown[:4]] * 9).requires_grad
        mixed = torch.cat([whole] * 8 + [whole.double()])
        assert mixed.dtype is torch.float64 and len(mixed) == 180

"""No prediction changes by what makes a trace short: kept answers of torch for operations on fake
tensors, and short ways through a large world."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import predictions

from harness.planner.tracing.shortcuts import Shortcuts
from harness.spec import Spec

SPEC = Spec(
    recipe="", model="DiT-T/8:depth=2", data="synthetic", global_batch=4, processes=4, device="cuda"
)
# Of twelve ranks most sizes of a DiT are no multiple: pieces are short, empty and padded.
TWELVE = {"global_batch": 12, "processes": 12}
CASES = [
    ("remembered", {"recipe": "zero3_offload+fp16+lora:rank=4+checkpoint"}),
    ("remembered", {"recipe": "fsdp2+bf16"}),
    ("remembered", {"recipe": "single+adam8bit+accumulate:steps=2", "processes": 1}),
    ("shortcuts", {"recipe": "zero3+bf16+checkpoint", **TWELVE}),
    ("shortcuts", {"recipe": "zero3_offload+bf16", **TWELVE}),
]


@pytest.mark.thorough
def test_a_prediction_is_the_same_to_the_byte_the_long_way(tmp_path):
    specs = [(way, dataclasses.asdict(SPEC) | case) for way, case in CASES]
    # A library keeps tables from the first trace of a process: that one is compared with none.
    cases = [{**spec, way: kept} for way, spec in specs for kept in (True, False)]
    found = predictions([specs[0][1], *cases], tmp_path)[1:]
    for case, short, long in zip(CASES, found[::2], found[1::2], strict=True):
        assert short["method"] == "trace", short["reason"]
        for one in (short, long):
            one["work"].sort(key=str)
        assert short == long, case


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

"""No prediction changes by what makes a trace short: kept answers of torch for operations on fake
tensors, and short ways through a large world."""

import dataclasses

import pytest
from conftest import predictions

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

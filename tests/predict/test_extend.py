"""A deep model predicted from shallow ones against a trace of all its blocks."""

from __future__ import annotations

import json

import pytest
from conftest import in_fork

from harness.predict.tracing import extend
from harness.resolve import resolve
from harness.spec import Spec

LAYERS = {
    "flux-dev": "num_layers=5,num_single_layers=7",
    "ltx-video-2b": "num_layers=11",
    "sd3.5-medium": "",
    "pixart-sigma": "",
}
BEFORE = {"sd3.5-medium": "CLIP-L,CLIP-G"}
"""What a model's pool held before."""
CASES = [
    ("flux-dev", "single+bf16_pure+lora:rank=16+checkpoint", 1, "flow"),
    ("pixart-sigma", "zero2+bf16", 8, "epsilon"),
    ("ltx-video-2b", "single+bf16_pure:autocast=on+checkpoint+adamw:impl=foreach", 1, "flow"),
    ("sd3.5-medium", "single+bf16_pure+lora:rank=16", 1, "flow"),
]
BYTES, POOL, UNTOLD, WORK = 0.005, 0.01, 0.10, 0.03
LAUNCHES = 0.05
"""How far tensors, the allocator's reserve (where its allocations are told from shallow models',
and where not) and the work may be off."""


def spec_of(model: str, recipe: str, ranks: int, objective: str) -> Spec:
    return Spec(
        recipe=recipe, model=model, set=LAYERS[model], objective=objective, data="synthetic",
        global_batch=ranks, processes=ranks, device="cuda", ema=0.0,
        before=BEFORE.get(model, ""),
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("extended")
    cases = [vars(spec_of(*case)) for case in CASES]
    (folder / "cases.json").write_text(json.dumps(cases))
    in_fork(folder, "tests.children.extended", folder / "cases.json", folder / "out.json")
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{CASES[i][1]}")
def test_two_blocks_of_each_group_tell_of_all(case, found):
    made, whole = found[case]["extended"], found[case]["whole"]
    for name in ("allocated", "between"):
        assert made[name] == pytest.approx(whole[name], rel=BYTES), name
    for name in ("peak", "steady", "host"):
        assert made[name]["bytes"] == pytest.approx(whole[name]["bytes"], rel=BYTES), name
    assert made["beyond_state"] == pytest.approx(whole["beyond_state"], rel=BYTES)
    assert whole["beyond_state"] == max(whole["beyond"].values()) < whole["steady"]["bytes"]
    for phase in ("forward", "backward"):
        assert made["beyond"][phase] == pytest.approx(whole["beyond"][phase], rel=BYTES), phase
    # Buckets fill across blocks, so that those of one are not told; a note says so.
    assert not (CASES[case][1].startswith("single") and made["notes"])
    pool = UNTOLD if made["notes"] else POOL
    for name in ("reserved", "reserved_expandable", "least"):
        assert made[name] == pytest.approx(whole[name], rel=pool), name
    assert sum(made["peak"]["categories"].values()) == pytest.approx(
        made["peak"]["bytes"], rel=BYTES
    )
    for name in ("flops", "bytes", "count"):
        sums = [sum(w[name] * (1 if name == "count" else w["count"]) for w in p["work"])
                for p in (made, whole)]  # fmt: skip
        # Collectives go by buckets, which fill across blocks: their number is not a block's.
        assert sums[0] == pytest.approx(sums[1], rel=LAUNCHES if name == "count" else WORK), name


def test_a_straight_line_through_two_blocks_would_not_do(found):
    """The control: what is extended must differ from the shallow model's own peak."""
    for case in found:
        assert case["shallow"] < 0.8 * case["whole"]["allocated"]


def test_a_shallow_model_is_traced_whole():
    assert extend.shallow(resolve(Spec(recipe="single", model="DiT-XL/2", device="cuda"))) == []
    few = Spec(recipe="single", model="flux-dev", set="num_layers=2,num_single_layers=3",
               data="synthetic", objective="flow", device="cuda")  # fmt: skip
    assert extend.shallow(resolve(few)) == []
    deep = extend.shallow(resolve(spec_of("sd3.5-medium", "ddp+bf16", 8, "flow")))
    assert deep[0][0] == {"dual_attention_layers": 2, "num_layers": 2}
    assert [more for _, more in deep] == [0, 5.5, 4.5]

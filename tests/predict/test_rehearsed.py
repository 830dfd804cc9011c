"""Whole predictions beside what was counted otherwise.

A CUDA build of torch trained the first rows on devices whose memory was host memory, with its
caching allocator, ProcessGroupNCCL, FSDP2 and DeepSpeed (an H100's kernels, torch 2.13). It shares
no code with predictions. docs/explanation/accuracy.md has rows of real GPUs.
"""

from __future__ import annotations

import dataclasses

import pytest
from conftest import traced

from harness import ROOT
from harness.planner import pool
from harness.planner.uncertainty import class_of
from harness.prediction import read
from harness.resolve import resolve
from harness.spec import Spec
from strategies import initial
from strategies.base import pinned_block

MIB = 2**20
COUNTED = {
    "1 single": (49.89, 68), "1 single+bf16": (45.01, 62), "1 single+checkpoint": (36.38, 54),
    "1 single+fp16": (45.01, 62), "1 single+bf16_pure": (31.33, 48), "1 single+lora": (29.91, 46),
    "1 single+block_swap:blocks=3": (40.81, 76), "1 single+offload_activations": (34.08, 54),
    "1 single+controlnet": (41.05, 58), "2 ddp": (48.78, 56), "2 zero1": (32.61, 76),
    "2 zero2+fp16": (24.54, 70), "2 zero2_offload": (24.95, 36), "2 zero3": (36.01, 60),
    "2 zero3+bf16+checkpoint": (22.16, 48), "2 zero3_offload+bf16": (15.45, 34),
    "2 fsdp2": (29.66, 72), "2 fsdp2_offload": (21.45, 62), "2 pp": (25.30, 42),
    "4 fsdp2": (19.02, 58),
}  # fmt: skip
"""Cards and recipe -> MiB allocated and reserved: DiT-T/4, synthetic data, a global batch of 8."""
OFTEN = (
    *("1 single+block_swap:blocks=3", "2 ddp", "2 zero2+fp16", "2 zero2_offload"),
    *("2 zero3+bf16+checkpoint", "2 fsdp2"),
)
"""Each engine, each stream of its own, and buckets beside others."""
OTHERS = tuple(name for name in COUNTED if name not in OFTEN)


@pytest.mark.thorough
@pytest.mark.parametrize("names", [OFTEN, OTHERS])
def test_a_prediction_is_what_torch_s_allocator_counted(names, tmp_path):
    rows = []
    for cards, recipe in map(str.split, names):
        spec = Spec(recipe=recipe, model="DiT-T/4", data="synthetic", global_batch=8,
                    processes=int(cards), device="cuda")  # fmt: skip
        rows.append(resolve(spec))
    found = pool.predict_all(rows, tmp_path, kind="cudnn", jobs=1)
    for name, one in zip(names, found, strict=True):
        allocated, reserved = COUNTED[name]
        assert one.method == "trace", f"{name}: {one.reason} {one.fault}"
        assert one.allocated / MIB == pytest.approx(allocated, rel=0.005), name
        assert one.reserved / MIB == pytest.approx(reserved, rel=0.02, abs=2), name
        if name == "2 ddp":
            later = one.steady.bytes / MIB
            assert later == pytest.approx(43.35, rel=0.005), "a later step lacks the old buckets"


# ---- weights and optimizer state in host memory ----

SPEC = Spec(recipe="", model="DiT-S/4:depth=8", data="synthetic", global_batch=2, device="cuda")
BLOCK = 4 * (4 * 384**2 + 2 * 4 * 384**2 + 6 * 384**2)
"""Bytes of a block's matrices in float32; its biases are less than a hundredth of that."""


def copied(found, phase: str, kind: str = "streamed") -> int:
    done = [w for w in found["work"] if (w["kind"], w["phase"]) == (kind, phase)]
    return sum(w["count"] * w["bytes"] for w in done)


@pytest.mark.thorough
def test_the_device_holds_two_of_the_streamed_blocks(tmp_path):
    recipes = ["lora", "block_swap:blocks=6+lora", "block_swap:blocks=8", "bf16+cast+lora",
               "block_swap:blocks=8+adafactor+optimizer_in_backward"]  # fmt: skip
    specs = [dataclasses.replace(SPEC, recipe=f"single+{r}", grad_clip=0.0) for r in recipes]
    cases = [dataclasses.asdict(spec) for spec in specs]
    plain, frozen, trained, cast, fused = traced("predicted", cases, tmp_path)
    for found in (plain, frozen, trained, cast, fused):
        assert found["method"] == "trace", found["reason"]

    def weights(found) -> int:
        return found["steady"]["categories"]["parameters"]

    assert weights(plain) - weights(frozen) == pytest.approx((6 - 2) * BLOCK, rel=0.02)
    held, least = (found["host_steady"]["bytes"] for found in (frozen, plain))
    assert held - least == pytest.approx(6 * BLOCK, rel=0.05)
    assert copied(plain, "forward") == 0
    # The last of them waits on the device for backward to come.
    assert copied(frozen, "forward") == pytest.approx(6 * BLOCK, rel=0.02)
    assert copied(frozen, "backward") == pytest.approx(5 * BLOCK, rel=0.02)
    # What works on tokens, two thirds of a block, takes a byte in the place of four.
    assert weights(plain) - weights(cast) == pytest.approx(8 * BLOCK * 2 / 3 * 3 / 4, rel=0.03)
    # Where they train a gradient leaves for each weight; moments are in host memory.
    assert copied(trained, "backward") == pytest.approx((7 + 8) * BLOCK, rel=0.02)
    host = trained["host_steady"]["categories"]
    assert host["optimizer_state"] == pytest.approx(2 * 8 * BLOCK, rel=0.02)
    assert trained["steady"]["categories"]["optimizer_state"] < 2 * BLOCK
    # Stepped within backward, weights leave in the place of gradients; no state is on the host.
    assert copied(fused, "backward") == pytest.approx((7 + 8) * BLOCK, rel=0.02)
    assert weights(fused) == pytest.approx(weights(trained), rel=0.001)
    assert fused["host_steady"]["bytes"] == pytest.approx(least + 8 * BLOCK, rel=0.02)
    assert 0 < fused["steady"]["categories"]["optimizer_state"] < BLOCK / 10


@pytest.mark.thorough
def test_torchao_s_optimizer_in_host_memory_is_predicted_as_it_is_laid_out(tmp_path):
    """Pinned copies of each large weight and of its gradient, and moments beside them."""
    pytest.importorskip("torchao")
    specs = [dataclasses.replace(SPEC, recipe=f"single+bf16{more}", grad_clip=0.0)
             for more in ("", "+offload_adamw")]  # fmt: skip
    plain, found = traced("predicted", [dataclasses.asdict(spec) for spec in specs], tmp_path)
    assert found["method"] == "trace", found["reason"]
    module = initial.build(resolve(specs[0]).subject, 0, "awake")
    large = [p.nbytes for p in module.parameters() if p.requires_grad and p.numel() >= 4096]
    # The smallest weights' moments stay on the device, less than a thousandth of all.
    host = 2 * sum(map(pinned_block, large)) + 2 * sum(large)
    assert found["host_steady"]["bytes"] == pytest.approx(host, rel=2e-3)
    saved = plain["between"] - found["between"]
    assert saved == pytest.approx(2 * sum(large), rel=2e-3)
    assert found["steady"]["categories"]["gradients"] == plain["steady"]["categories"]["gradients"]
    # Gradients leave in backward; weights come back while the host steps the next ones.
    for phase in ("backward", "optimizer"):
        assert copied(found, phase) == sum(large) and copied(plain, phase) == 0
    moved = copied(found, "optimizer", "host")
    assert moved == pytest.approx(8 * sum(large), rel=1e-3), "weight, gradient, two moments: twice"
    kinds = [class_of(resolve(spec).launch.traits, read(one))
             for spec, one in zip(specs, (plain, found), strict=True)]  # fmt: skip
    assert kinds == ["one GPU", "offloaded"]


# ---- the table of docs/reference/models.md ----

PAGE = ROOT / "docs/reference/models.md"
PARTS = {"full": "", "chunked": "+cross_entropy", "fused": "+cross_entropy:kind=fused"}


@pytest.mark.thorough
def test_the_peaks_are_what_is_predicted(tmp_path):
    said = {}
    for line in PAGE.read_text().partition("| vocabulary | full |")[2].splitlines()[2:]:
        if not line:
            break
        words, *mib, _ = line.strip("|").split("|")
        said[int(words.replace(",", ""))] = dict(zip(PARTS, map(int, mib), strict=True))
    spec = dict(objective="masked", data="synthetic", device="cuda", global_batch=16)
    asked = [(words, kind) for words in (8192, 131072) for kind in PARTS]
    rows = [
        resolve(Spec(recipe=f"single+bf16{PARTS[kind]}", model=f"DiT-B/2:tokens={words}", **spec))
        for words, kind in asked
    ]
    for (words, kind), found in zip(asked, pool.predict_all(rows, tmp_path), strict=True):
        assert found.steady.bytes / 2**20 == pytest.approx(said[words][kind], abs=1), kind


# ---- what makes a trace short changes nothing ----

# Of twelve ranks most sizes of a DiT are no multiple: pieces are short, empty and padded.
TWELVE = {"global_batch": 12, "processes": 12}
ALIKE = {"model": "DiT-T/8:depth=2", "data": "synthetic", "device": "cuda",
         "global_batch": 4, "processes": 4}  # fmt: skip
CASES = [
    ("remembered", {"recipe": "zero3_offload+fp16+lora:rank=4+checkpoint"}),
    ("remembered", {"recipe": "fsdp2+bf16"}),
    ("remembered", {"recipe": "single+adam8bit+accumulate:steps=2", "processes": 1}),
    ("shortcuts", {"recipe": "zero3+bf16+checkpoint", **TWELVE}),
    ("shortcuts", {"recipe": "zero3_offload+bf16", **TWELVE}),
]


@pytest.mark.thorough
def test_a_prediction_is_the_same_to_the_byte_the_long_way(tmp_path):
    specs = [(way, {**ALIKE, **case}) for way, case in CASES]
    # A library keeps tables from the first trace of a process: that one is compared with none.
    cases = [{**spec, way: kept} for way, spec in specs for kept in (True, False)]
    found = traced("predicted", [specs[0][1], *cases], tmp_path)[1:]
    for case, short, long in zip(CASES, found[::2], found[1::2], strict=True):
        assert short["method"] == "trace", short["reason"]
        for one in (short, long):
            one["work"].sort(key=str)
        assert short == long, case

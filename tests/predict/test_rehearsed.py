"""Predictions beside what torch's own CUDA allocator counted, and large ones beside ZeRO's table.

A CUDA build of torch trained these rows on devices whose memory was host memory, with its caching
allocator, ProcessGroupNCCL, FSDP2 and DeepSpeed (an H100's kernels, torch 2.13). It shares no code
with predictions. docs/explanation/accuracy.md has rows of real GPUs.
"""

import pytest

from harness.planner import pool
from harness.resolve import resolve
from harness.spec import Spec

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


@pytest.mark.parametrize("names", [OFTEN, pytest.param(OTHERS, marks=pytest.mark.thorough)])
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


LARGE = ("zero1", "zero2+bf16", "zero3_offload+bf16")


@pytest.mark.thorough
def test_states_of_a_large_model_on_eight_gpus_are_those_of_zero_s_table(tmp_path):
    """Rajbhandari et al. 2020 (arXiv:1910.02054), figure 1, with an average of float32."""
    specs = [Spec(recipe=recipe, model="DiT-B/8", data="synthetic", global_batch=32, processes=8,
                  device="cuda") for recipe in LARGE]  # fmt: skip
    rows = [resolve(spec) for spec in specs]
    for row, one in zip(rows, pool.predict_all(rows, tmp_path, jobs=1), strict=True):
        assert one.method == "trace", f"{one.recipe}: {one.reason} {one.fault}"
        size, count = 2 if "bf16" in one.recipe else 4, row.subject.parameters
        whole = size * (count / 8 if "zero3" in one.recipe else count)
        wanted = {"parameters": whole, "optimizer_state": 12 * count / 8, "ema": 4 * count / 8}
        held = one.steady.categories
        if "offload" in one.recipe:
            kinds = {work.kind for work in one.work}
            assert held["optimizer_state"] == 0 and {"transfer", "host"} <= kinds
            held = {name: size + one.host_steady.categories[name] for name, size in held.items()}
        for name, size in wanted.items():
            assert held[name] == pytest.approx(size, rel=0.04), f"{one.recipe}: {name}"

"""The closed form against the trace, which shares no formula with it; and what is built on it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from conftest import in_fork

from harness.resolve import resolve
from harness.spec import Spec
from harness.subjects.dit.presets import trainable_count
from harness.suite import matrix
from tests import oracle
from tests.oracle.layers import by_rank, elements, layers, parameters
from tests.oracle.sizes import sizes

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 0.02
GIB = 2**30

# S has activations that outweigh its states, B at patch 8 states that outweigh its activations.
S, B = "DiT-S/4:depth=2", "DiT-B/8:depth=2"

# recipe, model, samples a rank and micro batch, ranks, device
CASES = [
    ("single", S, 32, 1, "cuda"),
    ("single+bf16+checkpoint", S, 32, 1, "cuda"),
    ("single+adamw:impl=plain", B, 4, 1, "cuda"),
    ("ddp+bf16+ema:place=cpu", B, 4, 8, "cuda"),
    ("ddp+checkpoint:every=2", S, 16, 2, "cpu"),
    ("zero1", B, 4, 2, "cuda"),
    ("zero2+bf16+checkpoint", B, 4, 8, "cuda"),
    ("zero2+accumulate:steps=2", B, 4, 2, "cpu"),
    ("zero2+adamw:impl=foreach", B, 4, 2, "cuda"),
    ("zero3+bf16", B, 4, 8, "cpu"),
    ("zero3+bf16+accumulate:steps=2", S, 32, 8, "cuda"),
    ("zero3_offload+checkpoint", B, 4, 8, "cuda"),
    ("zero3_offload+bf16+ema:place=cpu", S, 32, 1, "cuda"),
    ("zero2_offload+bf16", S, 32, 2, "cpu"),
]


def spec(recipe: str, model: str, share: int, ranks: int, device: str) -> Spec:
    one = Spec(recipe=recipe, model=model, data="synthetic", device=device, processes=ranks)
    steps = resolve(dataclasses.replace(one, global_batch=4 * ranks)).recipe.accumulation
    return dataclasses.replace(one, global_batch=share * ranks * steps)


@pytest.fixture(scope="module")
def peaks(tmp_path_factory) -> dict[tuple, int]:
    """Case -> traced bytes."""
    folder = tmp_path_factory.mktemp("peaks")
    specs = [dataclasses.asdict(spec(*case)) for case in CASES]
    (folder / "specs.json").write_text(json.dumps(specs))
    in_fork(folder, "tests.children.peaks", folder / "specs.json", folder / "out.json")
    return dict(zip(CASES, json.loads((folder / "out.json").read_text()), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_the_closed_form_is_the_trace_within_two_percent(case, peaks):
    assert peaks[case] > 50 * 2**20, "too small a case to tell anything"
    assert oracle.peak_bytes(resolve(spec(*case))) == pytest.approx(peaks[case], rel=LIMIT)


@pytest.mark.parametrize(
    ("recipe", "part"),
    [
        ("zero3_nvme", "zero3_nvme"),
        ("single+lora", "lora"),
        ("single+checkpoint:keep=products", "checkpoint:keep=products"),
    ],
)
def test_what_no_formula_holds_is_named_and_has_no_number(recipe, part):
    resolved = resolve(Spec(recipe=recipe, device="cuda"))
    assert oracle.peak_bytes(resolved) is None
    assert oracle.unknown_parts(resolved) == [part]


@pytest.mark.parametrize("model", ["DiT-T/8", "DiT-S/4:depth=3", "DiT-XL/2"])
def test_the_layers_are_the_model_s(model):
    resolved = resolve(Spec(recipe="zero2", model=model, data="digits", processes=2))
    found = layers(resolved)
    assert elements(found) == trainable_count(resolved.subject.shape, classes=10)
    share = sizes(resolved).share
    owned = [ranks.get(0, 0) for ranks in by_rank(parameters(found), share).values()]
    assert sum(owned) == share


def test_the_layers_come_in_the_order_of_the_model_s_parameters():
    from harness.subjects.dit import model
    from tests.oracle.layers import stored

    resolved = resolve(Spec(recipe="single", model="DiT-T/8", data="digits"))
    built = model.build("DiT-T/8", input_size=32, channels=4, classes=10, seed=0)
    real = [p.numel() for p in built.parameters() if p.requires_grad]
    assert [one.size for one in parameters(stored(layers(resolved)))] == real


# ---- the batch of a suite ----


@pytest.mark.parametrize(
    ("model", "gib", "processes", "wanted"),
    [
        ("DiT-XL/2", 139, 1, 64),
        ("DiT-XL/2", 80, 8, 32),  # the paper's global batch of 256
        ("DiT-XL/2", 40, 1, 32),
        ("DiT-XL/2", 24, 2, 8),
        ("DiT-XL/2", 12, 1, 4),  # not even the state fits: the rows that save memory are left
        ("DiT-S/2", 24, 1, 64),
        ("DiT-T/8", 24, 1, 64),
    ],
)
def test_the_batch_of_a_suite_fits_the_smallest_gpu(model, gib, processes, wanted):
    settings = {"model": model, "data": "synthetic"}
    found = matrix.fitting_batch(settings, gib * GIB, processes)
    assert found == wanted and found % 4 == 0


@pytest.mark.parametrize("samples", [4, 16, 64])
@pytest.mark.parametrize("ema", [0.0, 0.9999])
@pytest.mark.parametrize("model", ["DiT-S/4", "DiT-B/2", "DiT-B/8", "DiT-L/2", "DiT-XL/2"])
def test_the_rule_of_thumb_is_the_closed_form_within_two_percent(model, ema, samples):
    one = Spec(recipe="ddp", model=model, data="synthetic", device="cuda", global_batch=samples)
    resolved = resolve(dataclasses.replace(one, ema=ema))
    rule = matrix.plain_bytes(resolved.subject, samples, ema=ema > 0)
    assert rule == pytest.approx(oracle.peak_bytes(resolved), rel=LIMIT)


@pytest.mark.parametrize("gib", [16, 24, 40])
def test_the_batch_fits_and_twice_does_not(gib):
    settings, room = {"model": "DiT-L/2"}, matrix.HEADROOM * gib * GIB
    share = matrix.fitting_batch(settings, gib * GIB, 1)
    subject = resolve(Spec(recipe="ddp", **settings)).subject
    assert matrix.plain_bytes(subject, share, ema=True) <= room
    assert share < matrix.most(1) and matrix.plain_bytes(subject, 2 * share, ema=True) > room

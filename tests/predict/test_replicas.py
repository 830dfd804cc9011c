"""What an atlas takes for granted of DDP: one number of its ranks is predicted as any other."""

from __future__ import annotations

import dataclasses

import pytest

from harness.planner import pool
from harness.prediction import Prediction
from harness.resolve import resolve
from harness.spec import Spec

pytestmark = pytest.mark.thorough

COUNTS = (2, 24)
ALIKE = [
    ("pixart-sigma", "ddp+bf16_pure+lora:rank=16+checkpoint"),
    ("pixart-sigma", "ddp+bf16"),
]
SHARDED, OWN = ("pixart-sigma", "zero2+bf16"), ("DiT-S/4", "ddp+bf16")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[tuple[str, str, int], Prediction]:
    """(model, recipe, GPUs) -> its prediction, with two blocks and two samples a GPU."""
    keys = [(*case, count) for case in (*ALIKE, SHARDED, OWN) for count in COUNTS]
    rows = [
        resolve(
            Spec(recipe=recipe, model=model, set="" if "/" in model else "num_layers=2",
                 data="synthetic", processes=count, global_batch=2 * count, device="cuda")
        )
        for model, recipe, count in keys
    ]  # fmt: skip
    made = pool.predict_all(rows, tmp_path_factory.mktemp("predictions"), jobs=2)
    assert all(one.method == "trace" for one in made)
    plain = (dataclasses.replace(one, seconds_taken=0.0) for one in made)
    return dict(zip(keys, plain, strict=True))


@pytest.mark.parametrize(("model", "recipe"), ALIKE)
def test_a_rank_of_ddp_holds_and_does_the_same_however_many_there_are(model, recipe, found):
    few, many = (found[model, recipe, count] for count in COUNTS)
    assert few == many and few.bytes


def test_a_rank_of_zero_holds_less_the_more_there_are(found):
    """The control."""
    few, many = (found[(*SHARDED, count)] for count in COUNTS)
    assert few.between > 1.2 * many.between


def test_of_the_own_dit_each_rank_draws_the_noise_of_all(found):
    """So that no layout changes it; an atlas has none of it."""
    few, many = (found[(*OWN, count)] for count in COUNTS)
    assert few.beyond["forward"] < many.beyond["forward"]

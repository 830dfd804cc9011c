"""What an atlas takes for granted of DDP: one number of its ranks is predicted as any other."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from harness.predict import pool
from harness.predict.prediction import Prediction
from harness.resolve import resolve
from harness.spec import Spec

COUNTS = (2, 8, 24)
MODELS = {"pixart-sigma": "num_layers=2", "dit-xl-2": "num_layers=2", "DiT-S/4": ""}
RECIPES = ("ddp+bf16_pure+lora:rank=16+checkpoint", "ddp+bf16", "zero2+bf16")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[tuple[str, str, int], Prediction]:
    """(model, recipe, GPUs) -> its prediction, with two samples a GPU."""
    keys = list(itertools.product(MODELS, RECIPES, COUNTS))
    rows = [
        resolve(
            Spec(recipe=recipe, model=model, set=MODELS[model], data="synthetic", processes=count,
                 global_batch=2 * count, device="cuda")
        )
        for model, recipe, count in keys
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("predictions")
    made = pool.predict_all(rows, folder, jobs=2)
    assert all(one.method == "trace" for one in made)
    plain = (dataclasses.replace(one, seconds_taken=0.0) for one in made)
    return dict(zip(keys, plain, strict=True))


@pytest.mark.parametrize("model", ["pixart-sigma", "dit-xl-2"])
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.startswith("ddp")])
def test_a_rank_of_ddp_holds_and_does_the_same_however_many_there_are(model, recipe, found):
    first, *others = (found[model, recipe, count] for count in COUNTS)
    assert all(other == first for other in others)


def test_of_the_own_dit_each_rank_draws_the_noise_of_all(found):
    """So that no layout changes it; an atlas has none of it."""
    sizes = [found["DiT-S/4", "ddp+bf16", count].beyond["forward"] for count in COUNTS]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("model", MODELS)
def test_a_rank_of_zero_holds_less_the_more_there_are(model, found):
    """The control."""
    sizes = [found[model, "zero2+bf16", count].between for count in COUNTS]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)

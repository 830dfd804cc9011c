"""Memory of real pairs of ranks, by c10's allocator and by ZeRO's formulas."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess

import pytest
from conftest import Case, begin

from harness import ROOT
from harness.memory.record import as_measured
from harness.planner import pool
from harness.resolve import resolve
from harness.spec import Spec

pytestmark = pytest.mark.thorough

RECIPES = ("zero3", "ddp", "zero2", "zero2+bf16")
HELD = 4_000_000
"""Bytes that ZeRO-3 was seen to hold beyond its trace, in some runs and not in others (0 to 3.2 MB
of 122): unexplained; tensors that gloo's thread has not let go yet are the likely reason."""
PAIR = Spec(recipe="zero2", model="DiT-S/4:depth=2", global_batch=8, warmup=1, steps=2, processes=2)
SCRATCH = 1_200_000
"""Bytes: what oneDNN's convolution (the patch embedding's) takes inside one op and gives back: its
inputs and its gradients, reordered. No trace of ops can show it, nor a prediction."""
SLACK = 0.002


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Recipe -> the traced categories of rank 0, and the peak by that count."""
    folder, found = tmp_path_factory.mktemp("counted"), {}
    library, source = folder / "allocations.so", ROOT / "tests/children/allocations.cpp"
    compiler = [os.environ.get("CXX", "c++"), "-O2", "-shared", "-fPIC"]
    subprocess.run([*compiler, str(source), "-o", str(library)], check=True)
    start = begin(LD_PRELOAD=str(library))
    for recipe in RECIPES:
        own, log = folder / recipe, folder / f"{recipe}.log"
        own.mkdir()
        case = Case(dataclasses.replace(PAIR, recipe=recipe), module="tests.children.counted")
        start.case(case.asked(own), log, seconds=300)
        assert (own / "counted.json").exists(), log.read_text()
        found[recipe] = json.loads((own / "counted.json").read_text())
    start.close()
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_trace_is_the_allocator_s_peak(pairs, recipe):
    found = pairs[recipe]
    assert found["total"] > 50 * 2**20, "too small a case to tell anything"
    missed = found["allocated"] - found["total"]
    assert (
        -SLACK * found["total"]
        <= missed
        <= SLACK * found["total"] + SCRATCH + HELD * ("zero3" in recipe)
    )


def states(recipe: str) -> tuple[int, dict[str, float]]:
    """The model's bytes, and those of what stands, by ZeRO's table (arXiv:1910.02054)."""
    subject, engine = resolve(PAIR).subject, recipe.partition("+")[0]
    count = subject.survey.sizes.total
    frozen = subject.parameters - count
    stage = int(engine[4]) if engine.startswith("zero") else 0
    each = 2 if stage and "bf16" in recipe else 4
    share = count / (2 if stage else 1)
    return 4 * subject.parameters, {
        "parameters": each * (count / 2 if stage == 3 else count) + each * frozen,
        "optimizer_state": (12 if stage else 8) * share,
        "ema": 4 * share,
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_stands_is_what_shapes_and_zero_s_table_say(pairs, recipe):
    found, (whole, expected) = pairs[recipe], states(recipe)
    for name in ("optimizer_state", "ema"):
        assert found[name] == pytest.approx(expected[name], rel=0.01), name
    if "zero3" in recipe:  # beside its share it has what it gathered for the layers at work
        gathered = found["parameters"] - expected["parameters"]
        assert 0 < gathered < 1.2 * whole
    else:
        assert found["parameters"] == pytest.approx(expected["parameters"], rel=0.01)


def test_the_prediction_is_the_allocator_s_peak(pairs, tmp_path):
    """Made without a real tensor, against a count that no tracer took part in."""
    recipes = ("ddp", "zero2", "zero3")
    asked = [resolve(Spec(**{**vars(PAIR), "recipe": recipe})) for recipe in recipes]
    for recipe, found in zip(recipes, pool.predict_all(asked, tmp_path), strict=True):
        assert found.method == "trace", found.reason
        total = as_measured(found.steady, found.buckets).total
        missed = pairs[recipe]["allocated"] - total
        assert abs(missed) <= SLACK * total + SCRATCH + HELD * (recipe == "zero3"), recipe

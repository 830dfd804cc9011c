"""Public models in miniature whose blocks lie in stages, held to ddp's losses, norms and updates;
and one under FSDP2 in mixed precision. All families under all kinds of strategy are in
``test_publics_launched``."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Case, hold_apart, hold_equal, launched_together, stored

from harness.planner import pool
from harness.report.figures import parity
from harness.resolve import resolve
from harness.result import Result, Status
from harness.spec import Spec
from strategies import parse
from tests.made.publics import miniature
from tests.sabotage.ranks import STANDING

pytestmark = pytest.mark.nightly

STAGED = {
    ("wan2.1-1.3b", "pp"): ("one group of blocks", 2),
    ("wan2.1-1.3b", "pp:micro=2"): ("each stage there twice", 4),
    ("flux-dev", "pp:schedule=interleaved+checkpoint"): ("two streams, in two groups", 2),
    ("flux-dev", "pp:stages=3"): ("stages of unequal length", 3),
    ("sd3.5-medium", "model_parallel+bf16"): ("two streams, rounded", 2),
}
"""Model and recipe of stages -> what is special, and the processes."""
EXACT = [case for case in STAGED if "bf16" not in case[1]]
GATHERED = "fsdp2+bf16"
SAVED, ON, THROUGH = ("saved", "goes on", "flux-dev pp:schedule=interleaved+checkpoint")


def staged(model: str, recipe: str, processes: int = 2, **change: object) -> Spec:
    """What is equal is equal because all clip, decay and step alike."""
    asked = {"global_batch": 12, "steps": 3, "weight_decay": 0.01, "grad_clip": 0.05, "ema": 0.9}
    return miniature(model, recipe, processes=processes, **asked | change)


@pytest.fixture(scope="module")
def launched_here(tmp_path_factory) -> tuple[dict[str, Result], Path]:
    base = tmp_path_factory.mktemp("publics")
    cases = {}
    for (model, recipe), (_, processes) in STAGED.items():
        cases[f"{model} {recipe}"] = Case(staged(model, recipe, processes))
    for model, _ in EXACT:
        cases[f"{model} ddp"] = Case(staged(model, "ddp"))
    cases[GATHERED] = Case(staged("wan2.1-1.3b", GATHERED))
    for name in STANDING:
        cases[name] = Case(staged("wan2.1-1.3b", "pp"), ("--sabotage", name))
    kept = ("--checkpoint", str(base / "checkpoints"))
    recipe = THROUGH.split()[1]
    cases[SAVED] = Case(staged("flux-dev", recipe, steps=2), kept)
    cases[ON] = Case(staged("flux-dev", recipe), (*kept, "--resume"))
    return launched_together(cases, base), base


@pytest.fixture(scope="module")
def results(launched_here):
    return launched_here[0]


@pytest.mark.parametrize(("model", "recipe"), STAGED)
def test_stages_of_a_public_model_are_one_training_with_evidence(model, recipe, results):
    row = results[f"{model} {recipe}"]
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    assert [check for check in row.audit if not check.ok] == []
    rounded = (model, recipe) not in EXACT
    if not rounded:
        hold_equal(row, results[f"{model} ddp"])
    facts = row.evidence[parse(recipe).sharding.name]
    held, shared = facts["elements_of_stages"], facts["shared_elements"]
    assert sum(held) - (len(held) - 1) * shared == row.parameters
    assert facts["shared_gradient_bytes"] == 4 * shared and facts["shared_spread"] == 0
    assert facts["away_from_the_whole"] < (1e-2 if rounded else 1e-5)
    depth, blocks = resolve(row.spec).subject.depth, facts["blocks_of_stages"]
    assert sum(blocks) == depth and max(blocks) - min(blocks) == (depth % len(held) > 0)


@pytest.mark.parametrize("name", STANDING)
def test_stages_that_share_nothing_are_noticed(name, results):
    hold_apart(results[name], results["wan2.1-1.3b ddp"])


def test_memory_of_stages_of_public_models_is_predicted(results, tmp_path):
    rows = [results[f"{model} {recipe}"] for model, recipe in [*STAGED][2:4]]
    made = pool.predict_all([resolve(row.spec) for row in rows], tmp_path)
    for row, prediction in zip(rows, made, strict=True):
        assert prediction.method == "trace", f"{prediction.reason} {prediction.fault}"
        found = prediction.steady_of_ranks
        true = {rank.rank: rank.categories.total for rank in row.ranks}
        wanted = [true[int(rank)] for rank in found]
        assert [*found.values()] == pytest.approx(wanted, rel=0.005), row.spec.recipe


def test_a_checkpoint_of_stages_is_a_plain_model_s(launched_here):
    results, base = launched_here
    for name in (SAVED, ON):
        assert results[name].status is Status.OK, results[name].log_tail
    through, on = results[THROUGH], results[ON]
    assert on.losses == pytest.approx(through.losses[: len(on.losses)], rel=1e-6)
    path = max((base / "checkpoints").glob("step-*"))
    saved = [name for part in stored(path) for name in part]
    plain = resolve(on.spec).subject.shell()
    assert sorted(saved) == sorted(dict(plain.named_parameters())), "each once"


def test_what_is_gathered_in_16_bits_is_given_16_bits(results, tmp_path):
    """Shards are float32, and nothing casts what comes into the model: its first layer would be
    given float32 beside a bfloat16 weight, in a run and in a prediction."""
    row, reference = results[GATHERED], results["wan2.1-1.3b ddp"]
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    assert row.evidence["fsdp2"]["gathered_as"] == "bfloat16"
    assert parity.computation(row) == "gathered in 16 bits"
    assert row.losses == pytest.approx(reference.losses, rel=2**-8)
    assert row.losses != reference.losses, "nothing was rounded"
    (made,) = pool.predict_all([resolve(row.spec)], tmp_path)
    assert made.method == "trace", f"{made.reason} {made.fault}"
    assert made.steady.bytes == pytest.approx(row.ranks[0].categories.total, rel=0.01)

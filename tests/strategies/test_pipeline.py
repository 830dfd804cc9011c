"""Stages of real ranks are one training, with evidence; where they are not, it is noticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from conftest import (
    STRIP,
    SUBJECT,
    TINY,
    Case,
    OnDemand,
    hold_alike,
    hold_apart,
    hold_equal,
    launchable,
    launched_together,
)
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from harness.planner import pool
from harness.planner.speed import roofline
from harness.prediction import Prediction
from harness.resolve import resolve
from harness.result import Result, Status
from harness.spec import Spec
from harness.system import cards
from strategies import parse

# As in test_runs: what is equal is equal because all clip, decay and step alike.
TWO = dataclasses.replace(
    TINY, recipe="ddp", processes=2, global_batch=8, steps=1, learning_rate=1e-3, weight_decay=0.01,
    beta2=0.99, grad_clip=0.25, ema=0.9,
)  # fmt: skip
EQUAL = [
    "pp",
    "pp:schedule=gpipe+checkpoint",
    "model_parallel",
    "pp:schedule=interleaved",
]
FOUR, REPEATED = "pp:stages=4", "pp:schedule=interleaved+checkpoint"
WIDE = [FOUR, REPEATED]
"""On four processes: four stages, and two of which each is there twice."""
OTHERS = ["pp+bf16"]
WORDS = ("ddp", "pp", "pp+cross_entropy")
"""Recipes of a DiT over a vocabulary, whose last stage takes the loss."""
PREDICTED = [EQUAL[1], FOUR, REPEATED, "pp+cross_entropy of words"]
"""A recipe of each kind of stages: of four, recomputed in runs and repeated, over words."""
LOST = {
    "another schedule runs": (
        "pp", "all_forward_before_any_backward",
        "the schedule is ScheduleGPipe, expected Schedule1F1B",
    ),
    "every rank holds everything": (
        "pp", "every_stage_keeps_the_whole_model", "parameters are on several stages",
    ),
    "one rank alone steps too few": (
        "pp", "one_parameter_of_the_last_stage_not_stepped",
        "rank 1: 1 parameters are only in the stage or only in its optimizer",
    ),
    "replicas train alone": (
        REPEATED, "gradients_of_replicas_not_averaged", "weights of the replicas differ",
    ),
}  # fmt: skip
"""Stages that are not what was asked for -> recipe, sabotage, a word of the complaint."""
UNLIKE = "gradients_not_divided_by_micro_batches"
"""Stages that are not one training, by parity with ddp."""
SAVED, ON = "saved", "goes on"
OFTEN = ("pp", REPEATED)
"""Those that run by default: ``worker/test_runs`` launches the other launch files as well."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Mapping[str, Result], Path]:
    """Name -> result, run when it is read, and where the folders of those names are."""
    base = tmp_path_factory.mktemp("pipeline")

    def case(recipe: str, *words: str, ranks: int = 2, steps: int = 1, fault: str = "") -> Case:
        spec = dataclasses.replace(TWO, recipe=recipe, steps=steps, processes=ranks)
        return Case(spec, words, fault=fault)

    cases = {recipe: case(recipe) for recipe in ("ddp", *EQUAL, *OTHERS)}
    cases |= {recipe: case(recipe, ranks=4) for recipe in WIDE}
    cases |= {f"{recipe} of words": Case(words(recipe)) for recipe in WORDS}
    for recipe, name, *_ in [*LOST.values(), ("pp", UNLIKE)]:
        ranks = 4 if recipe in WIDE else 2
        cases[f"{recipe} {name}"] = case(recipe, ranks=ranks, fault=name)
    folder = base / "checkpoints"
    kept = ["--checkpoint", str(folder), "--averaged", str(base / "averaged.safetensors")]
    cases[SAVED] = case(REPEATED, *kept, ranks=4, steps=2)
    cases[ON] = case(REPEATED, *kept, "--resume", ranks=4, steps=3)
    return OnDemand(lambda name: launched_together({name: cases[name]}, base)[name]), base


def words(recipe: str) -> Spec:
    """A training over tokens of a vocabulary."""
    return dataclasses.replace(
        TWO, model="DiT-T/8:tokens=64", objective="masked", data="synthetic", recipe=recipe
    )


# ---- in force ----


@pytest.mark.parametrize("row", launchable([*EQUAL, *WIDE, *OTHERS], OFTEN), indirect=True)
def test_stages_show_what_they_hold_and_pass_on(row):
    assert [check for check in row.audit if not check.ok] == []
    recipe, engine = parse(row.spec.recipe), resolve(row.spec).launch.engine
    micro, stages = engine.micro, engine.stages
    data = row.spec.processes // stages
    asked = {check.name: check.asked for check in row.audit}
    assert asked["samples shared alike"] is True
    assert asked["micro batch"] == [row.spec.global_batch // micro // data]
    facts = row.evidence[recipe.sharding.name]
    assert sum(facts["elements_of_stages"]) == SUBJECT.parameters == row.parameters
    assert len(facts["elements_of_stages"]) == stages
    assert facts["schedule"] == engine.schedule.kind
    # Tokens and condition, of each micro batch and over each border; then their gradients.
    size = SUBJECT.survey
    passed = 4 * size.width * (size.tokens + 1) * row.spec.global_batch // data
    assert facts["sent_to_stages_bytes"] == passed * (2 * engine.stage_runs - 1)
    assert facts.get("replica_spread", 0) == 0 and ("replica_spread" in facts) == (data > 1)


@pytest.mark.parametrize("row", launchable([*EQUAL, *WIDE], OFTEN), indirect=True)
def test_losses_gradients_and_updates_are_those_of_whole_models(row, runs):
    hold_equal(row, runs[0]["ddp"])


@pytest.mark.thorough
@pytest.mark.parametrize("row", ["pp of words", "pp+cross_entropy of words"], indirect=True)
def test_the_last_stage_takes_the_loss_over_a_vocabulary(row, runs):
    assert [check for check in row.audit if not check.ok] == []
    hold_equal(row, runs[0]["ddp of words"])
    assert sum(row.evidence["pp"]["elements_of_stages"]) == row.parameters
    loss = row.evidence.get("cross_entropy", {})
    assert ("cross_entropy" in row.spec.recipe) == (loss.get("vocabulary") == 64), "its stage tells"


@pytest.mark.thorough
def test_memory_of_every_stage_is_predicted_and_the_row_s_is_the_fullest(runs, tmp_path):
    rows = [runs[0][name] for name in PREDICTED]
    predicted = pool.predict_all([resolve(row.spec) for row in rows], tmp_path)
    for row, made in zip(rows, predicted, strict=True):
        assert made.method == "trace", f"{made.reason} {made.fault}"
        true = [rank.categories.total for rank in row.ranks]
        stages = resolve(row.spec).launch.engine.stages
        data = len(true) // stages
        found = [made.steady_of_ranks[str(rank.rank // data * data)] for rank in row.ranks]
        assert found == pytest.approx(true, rel=0.005), row.spec.recipe
        assert made.steady.bytes == max(found) == found[made.rank]
        facts = row.evidence[parse(row.spec.recipe).sharding.name]
        if stages == 2:  # of more, those in the middle have two neighbours
            assert passed_on(made, data) == facts["sent_to_stages_bytes"], row.spec.recipe
        if data > 1:
            averaged = 4 * facts["elements_of_stages"][made.rank // data]
            assert passed_on(made, 1) == averaged and made.rank % data == 0


def passed_on(made: Prediction, distance: int) -> int:
    """Bytes that the predicted rank sends in a step to one so far away."""
    pairs = [w for w in made.work if (w.group, w.stride) == (2, distance)]
    few = 100  # losses and norms, which all have
    return sum(w.count * w.bytes // 2 for w in pairs if w.bytes > few)


@pytest.mark.thorough
def test_stages_of_gpus_are_ranks_of_their_own_and_each_waits_for_the_others(tmp_path):
    spec = dataclasses.replace(TWO, device="cuda", processes=4, global_batch=8)
    texts = ("pp:stages=4,micro=8", "pp:schedule=interleaved,micro=4")
    rows = [resolve(dataclasses.replace(spec, recipe=text)) for text in texts]
    card = cards.find("RTX-3090")
    shares = (3 / 11, 1 / 9)  # waits of 3/8 (arXiv:1811.06965), of 1/(2 x 4) (arXiv:2104.04473)
    for share, made in zip(shares, pool.predict_all(rows, tmp_path), strict=True):
        assert made.method == "trace", f"{made.reason} {made.fault}"
        assert len(set(made.steady_of_ranks.values())) > 1, "ends hold what the middle does not"
        (chain,) = [w for w in made.work if w.kind == "chain"]
        alone = [w for w in made.work if w is not chain]
        busy = sum(
            roofline.seconds([w], card, 4).compute for w in alone if w.phase in roofline.BUSY
        )
        waited = roofline.seconds(made.work, card, 4).compute
        waited -= roofline.seconds(alone, card, 4).compute
        assert waited / (waited + busy) == pytest.approx(share)


# ---- saved, and resumed ----


def test_a_checkpoint_is_a_plain_model_s_and_training_goes_on(runs, train_here):
    rows, base = runs
    for name in (SAVED, ON):
        assert rows[name].status is Status.OK, f"{rows[name].reason}\n{rows[name].log_tail}"
    through = rows[REPEATED]
    assert rows[ON].losses == pytest.approx(through.losses[: len(rows[ON].losses)], rel=1e-6)
    path = max((base / "checkpoints").glob("step-*"))
    dcp_to_torch_save(path, base / "joined")
    saved = torch.load(base / "joined", weights_only=True)["model"]
    alone = dataclasses.replace(TWO, recipe="single", processes=1)
    run = train_here(alone, len(rows[ON].losses))
    hold_alike(saved, dict(run.module.named_parameters()))
    averages = load_file(base / "averaged.safetensors")
    hold_alike(averages, run.attached["ema"].full_state())


# ---- not in force ----


@pytest.mark.thorough
@pytest.mark.parametrize("case", LOST)
def test_stages_that_are_not_what_was_asked_for_are_noticed(case, runs):
    recipe, name, words = LOST[case]
    row = runs[0][f"{recipe} {name}"]
    assert row.status is Status.VOID, row.log_tail
    failed = {check.name: check.found for check in row.audit if not check.ok}
    assert any(check.startswith("evidence: pp") and words in failed[check] for check in failed)


@pytest.mark.thorough
def test_stages_that_are_not_one_training_are_noticed(runs):
    hold_apart(runs[0][f"pp {UNLIKE}"], runs[0]["ddp"])


# ---- refused ----


@pytest.mark.parametrize("model", [STRIP.model, "flux-dev"])
def test_a_model_that_does_not_say_its_ends_is_refused(model):
    spec = dataclasses.replace(STRIP, model=model, recipe="pp", processes=2, global_batch=8)
    spec = dataclasses.replace(spec, data="synthetic") if model == "flux-dev" else spec
    assert "what runs in front of its blocks" in str(resolve(spec).refusal)

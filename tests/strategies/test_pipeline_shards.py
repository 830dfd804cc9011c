"""Stages of a pipeline that ranks share by FSDP2, held to ddp's losses, norms and updates."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from conftest import (
    SUBJECT,
    TINY,
    Case,
    hold_alike,
    hold_apart,
    hold_equal,
    launched_together,
    stored,
)
from safetensors.torch import load_file

from harness.planner import pool
from harness.planner.speed import roofline
from harness.prediction import Prediction
from harness.resolve import resolve
from harness.result import Result, Status
from harness.spec import Spec
from harness.system import cards
from strategies import parse
from tests.made.publics import miniature
from tests.made.stubs.stages import SHARES_LOST, SHARES_UNLIKE

pytestmark = pytest.mark.thorough

# As in test_pipeline: what is equal is equal because all clip, decay and step alike.
FOUR = dataclasses.replace(
    TINY, recipe="ddp", processes=4, global_batch=8, steps=1, learning_rate=1e-3, weight_decay=0.01,
    beta2=0.99, grad_clip=0.25, ema=0.9,
)  # fmt: skip
EQUAL = [
    "pp_fsdp2",
    "pp_fsdp2:reshard=on+checkpoint",
    "pp_fsdp2:schedule=zbv",
]
OTHERS = ["pp_fsdp2+bf16"]
PUBLIC = [
    ("wan2.1-1.3b", "pp_fsdp2"),
    ("flux-dev", "pp_fsdp2:schedule=interleaved,reshard=on+checkpoint"),  # two streams, two runs
]
"""Public models whose stages are shared: what is in front of the blocks is all stages', and of each
its sharers'."""
SAVED, ON = "saved", "goes on"
"""A training that is kept, and one that goes on from there."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[dict[str, Result], Path]:
    """Name -> result, and where the folders of those names are."""
    base = tmp_path_factory.mktemp("pipeline_shards")

    def case(recipe: str, *words: str, ranks: int = 4, steps: int = 1) -> Case:
        return Case(dataclasses.replace(FOUR, recipe=recipe, steps=steps, processes=ranks), words)

    cases = {recipe: case(recipe) for recipe in (*EQUAL, *OTHERS)}
    cases["ddp"] = case("ddp", ranks=2)
    for recipe, name, *_ in [*SHARES_LOST.values(), *SHARES_UNLIKE.values()]:
        cases[f"{recipe} {name}"] = case(recipe, "--sabotage", name)
    kept = ["--checkpoint", str(base / "kept"), "--averaged", str(base / "averaged.safetensors")]
    cases[SAVED] = case(EQUAL[0], *kept, steps=2)
    cases[ON] = case(EQUAL[0], *kept, "--resume", steps=3)
    for model, recipe in PUBLIC:
        cases[f"{model} {recipe}"] = Case(public(model, recipe))
    for model, _ in PUBLIC:
        cases[f"{model} ddp"] = Case(public(model, "ddp", processes=2))
    return launched_together(cases, base), base


def public(model: str, recipe: str, processes: int = 4, **change: object) -> Spec:
    """What is equal is equal because all clip, decay and step alike."""
    asked = {"global_batch": 8, "steps": 1, "weight_decay": 0.01, "grad_clip": 0.05, "ema": 0.9}
    return miniature(model, recipe, processes=processes, **asked | change)


# ---- in force ----


@pytest.mark.parametrize("row", [*EQUAL, *OTHERS], indirect=True)
def test_ranks_of_a_stage_show_that_they_share_it(row):
    assert [check for check in row.audit if not check.ok] == []
    facts = row.evidence[parse(row.spec.recipe).sharding.name]
    assert facts["sharers"] == 2 and facts["mesh"] == [2] and facts["placements"] == "S(0)"
    assert facts["groups"] == facts["blocks"] + 1 == 3, "each block, and what lies outside of them"
    micro, reshard = facts["micro_batches"], facts["reshard_after_forward"]
    often = 2 * micro if reshard else 1
    assert facts["gathers_of_groups"] == [often] * 3 and facts["reductions"] == 3
    elements = facts["elements_of_stages"][0]
    width = 2 if "bf16" in row.spec.recipe else 4
    assert facts["gathered_as"] == ("bfloat16" if width == 2 else "float32")
    assert facts["gathered_bytes"] == nearly(width * elements / 2 * often)
    positions = SUBJECT.dimensions.tokens * SUBJECT.dimensions.width
    assert facts["gradient_bytes_reduced"] == nearly(4 * (elements - positions)), "they are frozen"
    assert facts["gradients_sent_as"] == "float32"
    assert facts["parameter_share"] == facts["optimizer_share"] == pytest.approx(0.5, abs=0.001)
    assert facts["away_from_the_whole"] < (1e-2 if "bf16" in row.spec.recipe else 1e-5)


def nearly(size: float) -> object:
    """So many bytes, but for rows that two ranks cannot share evenly."""
    return pytest.approx(size, rel=0.005)


@pytest.mark.parametrize("row", EQUAL, indirect=True)
def test_losses_gradients_and_updates_are_those_of_whole_models(row, runs):
    hold_equal(row, runs[0]["ddp"])


def test_memory_of_a_stage_s_rank_is_predicted(runs, tmp_path):
    rows = [runs[0][name] for name in (EQUAL[1], " ".join(PUBLIC[1]))]
    predicted = pool.predict_all([resolve(row.spec) for row in rows], tmp_path)
    for row, made in zip(rows, predicted, strict=True):
        assert made.method == "trace", f"{made.reason} {made.fault}"
        true = [rank.categories.total for rank in row.ranks]
        first = {rank.rank: rank.rank // 2 * 2 for rank in row.ranks}
        found = [made.steady_of_ranks[str(first[rank.rank])] for rank in row.ranks]
        assert found == pytest.approx(true, rel=0.005), row.spec.recipe
        assert made.steady.bytes == max(found) == found[made.rank]
        facts = row.evidence[parse(row.spec.recipe).sharding.name]
        shared = (facts["gathered_bytes"] * 2, facts["gradient_bytes_reduced"])
        if made.rank == 0 and "shared_elements" not in facts:
            assert sent_among_sharers(made) == sum(shared), row.spec.recipe


def sent_among_sharers(made: Prediction) -> int:
    """Bytes of the whole weights and gradients that the predicted rank gathers and reduces."""
    return sum(w.count * w.bytes for w in made.work if (w.group, w.stride) == (2, 1))


# ---- public models ----


@pytest.mark.parametrize(("model", "recipe"), PUBLIC)
def test_sharers_of_a_public_model_s_stages_are_one_training(model, recipe, runs):
    row = runs[0][f"{model} {recipe}"]
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    assert [check for check in row.audit if not check.ok] == []
    hold_equal(row, runs[0][f"{model} ddp"])
    facts = row.evidence["pp_fsdp2"]
    held, shared = facts["elements_of_stages"], facts["shared_elements"]
    assert sum(held) - (len(held) - 1) * shared == row.parameters
    assert facts["shared_gradient_bytes"] == nearly(4 * shared / 2) and facts["shared_spread"] == 0
    assert facts["sharers"] == 2 and facts["parameter_share"] == pytest.approx(0.5, abs=0.01)
    assert facts["away_from_the_whole"] < 1e-5
    often = (
        [2 * facts["micro_batches"]] * facts["groups"] if facts["reshard_after_forward"] else [1]
    )
    if facts["reshard_after_forward"]:
        often[0] *= len(facts["runs_of_stages"][0])  # what lies outside of blocks
    else:
        # Some of it has an odd number of rows.
        assert facts["gathered_bytes"] == pytest.approx(4 * held[0] / 2, rel=0.02)
        often *= facts["groups"]
    assert facts["gathers_of_groups"] == often


def test_a_thousand_gpus_share_stages(tmp_path):
    wide = dataclasses.replace(FOUR, device="cuda", recipe="pp_fsdp2", processes=1024)
    resolved = resolve(dataclasses.replace(wide, global_batch=4 * 512))
    (made,) = pool.predict_all([resolved], tmp_path)
    assert made.method == "trace", f"{made.reason} {made.fault}"
    assert made.steady_of_ranks.keys() == {"0", "512"}
    # Beside the samples: weights, average and two moments of half of the model, of which a rank
    # has a few rows each.
    data = SUBJECT.data
    samples = 4 * data.size * data.channels * data.input_size**2
    assert made.between - samples < 16 * SUBJECT.parameters / 2 / 50
    # Gathered beside the block at work; reduced when all of the step's gradients are there.
    sharers = [w for w in made.work if (w.group, w.stride) == (512, 1) and w.bytes > 1000]
    kinds = {(w.kind, w.phase) for w in sharers}
    assert kinds == {("overlapped", "forward"), ("collective", "backward")}
    others = [w for w in made.work if w not in sharers]
    card = cards.find("RTX-3090")
    dear, cheap = (roofline.seconds(work, card, 1024) for work in (made.work, others))
    assert dear.communication > 2 * cheap.communication


# ---- not in force ----


@pytest.mark.parametrize("case", SHARES_LOST)
def test_a_stage_that_is_not_shared_as_asked_for_is_noticed(case, runs):
    recipe, name, words = SHARES_LOST[case]
    row = runs[0][f"{recipe} {name}"]
    assert row.status is Status.VOID, row.log_tail
    failed = {check.name: check.found for check in row.audit if not check.ok}
    assert any(check.startswith("evidence: pp") and words in failed[check] for check in failed)


@pytest.mark.parametrize("case", SHARES_UNLIKE)
def test_sharers_that_are_not_one_training_are_noticed(case, runs):
    hold_apart(runs[0][" ".join(SHARES_UNLIKE[case])], runs[0]["ddp"])


# ---- saved, and resumed ----


def test_a_checkpoint_is_a_plain_model_s_and_training_goes_on(runs, train_here):
    rows, base = runs
    for name in (SAVED, ON):
        assert rows[name].status is Status.OK, f"{rows[name].reason}\n{rows[name].log_tail}"
    through = rows[EQUAL[0]]
    assert rows[ON].losses == pytest.approx(through.losses[: len(rows[ON].losses)], rel=1e-6)
    path = max((base / "kept").glob("step-*"))
    parts = stored(path)
    assert len(parts) == 2, "a file a stage, whoever shares it"
    saved = {name: weight for part in parts for name, weight in part.items()}
    alone = dataclasses.replace(FOUR, recipe="single", processes=1)
    run, _ = train_here(alone, len(rows[ON].losses))
    hold_alike(saved, dict(run.trained.module.named_parameters()))
    averages = load_file(base / "averaged.safetensors")
    hold_alike(averages, run.trained.attached["ema"].full_state())


# ---- refused ----


@pytest.mark.parametrize(
    ("text", "processes", "wanted"),
    [
        ("pp_fsdp2", 2, ["nobody to share it with", "--processes 4", "or pp"]),
        ("pp_fsdp2", 3, ["3 processes are not 2 stages"]),
        ("pp_fsdp2:stages=4", 4, ["nobody to share it with", "--processes 8"]),
        ("pp_fsdp2:schedule=zbv,reshard=on", 4, ["reshard=off", "schedule=interleaved"]),
        ("pp_fsdp2:schedule=zero_bubble+checkpoint", 4, ["leave checkpoint out"]),
        ("pp_fsdp2+tp", 4, ["take ddp"]),
        ("pp_fsdp2+compile", 4, ["compiled graphs"]),
        ("pp_fsdp2+adam8bit", 4, ["leave that out"]),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_the_way_out(text, processes, wanted):
    spec = dataclasses.replace(TINY, global_batch=48, recipe=text, processes=processes)
    reason = str(resolve(spec).refusal)
    assert reason and [w for w in wanted if w not in reason] == [], reason

"""Pipelines of real ranks, held to ddp's losses, norms and updates, each with evidence; and the
ways in which stages can fail to be one training, each of which must be noticed.

The runs share a start (``launched_together``).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from conftest import SUBJECT, TINY, Case, launched_together, verdict
from safetensors.torch import load_file

from harness.predict import pool
from harness.predict.prediction import Prediction
from harness.predict.speed import cards, roofline
from harness.report.figures import parity
from harness.resolve import resolve
from harness.result import Result, Status
from strategies import parse
from strategies.engines.pipeline import cut
from strategies.engines.pipeline.joined import INDEX
from strategies.engines.pipeline.schedules import SCHEDULES, idle_share
from strategies.recipe import RecipeError
from tests.made.stubs.stages import LOST, UNLIKE

# As in test_runs: what is equal is equal because all clip, decay and step alike.
TWO = dataclasses.replace(
    TINY, recipe="ddp", processes=2, global_batch=8, steps=3, learning_rate=1e-3, weight_decay=0.01,
    beta2=0.99, grad_clip=0.25, ema=0.9,
)  # fmt: skip
EQUAL = ["pp", "pp:schedule=gpipe+checkpoint", "model_parallel"]
OTHERS = ["pp+bf16"]
WIDER = "of more tokens"
"""Where what is still on its way shows in a peak."""
SAVED, ON = "saved", "goes on"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[dict[str, Result], Path]:
    """Name -> result, and where the folders of those names are."""
    base = tmp_path_factory.mktemp("pipeline")

    def case(recipe: str, *words: str, steps: int = 3) -> Case:
        return Case(dataclasses.replace(TWO, recipe=recipe, steps=steps), words)

    cases = {recipe: case(recipe) for recipe in ("ddp", *EQUAL, *OTHERS)}
    cases[WIDER] = Case(dataclasses.replace(TWO, recipe="pp", model="DiT-T/4"))
    sabotages = [*(name for name, _ in LOST.values()), *UNLIKE.values()]
    cases |= {name: case("pp", "--sabotage", name) for name in sabotages}
    folder = base / "checkpoints"
    kept = ["--checkpoint", str(folder), "--averaged", str(base / "averaged.safetensors")]
    cases[SAVED] = case("pp", *kept, steps=2)
    cases[ON] = case("pp", *kept, "--resume", steps=3)
    return launched_together(cases, base), base


# ---- in force ----


@pytest.mark.parametrize("row", [*EQUAL, *OTHERS], indirect=True)
def test_stages_show_what_they_hold_and_pass_on(row):
    assert [check for check in row.audit if not check.ok] == []
    recipe = parse(row.spec.recipe)
    micro = recipe.accumulation
    asked = {check.name: check.asked for check in row.audit}
    assert asked["samples shared alike"] is True
    assert asked["micro batch"] == [row.spec.global_batch // micro]
    facts = row.evidence[recipe.sharding.name]
    assert facts["blocks_of_stages"] == [2, 2] and facts["micro_batches"] == micro
    assert sum(facts["elements_of_stages"]) == SUBJECT.parameters == row.parameters
    first, last = facts["in_flight_of_stages"]
    assert (first, last) == {"1f1b": (2, 1), "gpipe": (micro, micro)}[
        "1f1b" if facts["schedule"] == "Schedule1F1B" else "gpipe"
    ]
    # Tokens and condition forward; rank 0 receives their gradients.
    size = SUBJECT.dimensions
    passed = 4 * size.width * (size.tokens + 1) * row.spec.global_batch
    assert facts["sends"] == 2 * micro and facts["sent_to_stages_bytes"] == passed
    assert facts["away_from_the_whole"] < (1e-2 if "bf16" in row.spec.recipe else 1e-5)
    assert facts["idle_share_computed"] == pytest.approx(idle_share(2, micro), abs=1e-4)
    assert 0 < facts["idle_share_measured"] < 1


@pytest.mark.parametrize("row", EQUAL, indirect=True)
def test_losses_gradients_and_updates_are_those_of_whole_models(row, runs):
    assert verdict(row, runs) == parity.Verdict("equal"), parity.distances(row, runs[0]["ddp"])


def test_one_micro_batch_at_a_time_leaves_a_stage_idle_half_of_the_step():
    assert idle_share(2, 1) == 1 / 2 and idle_share(4, 4) == 3 / 7 and idle_share(2, 4) == 1 / 5


def test_memory_of_every_stage_is_predicted_and_the_row_s_is_the_fullest(runs, tmp_path):
    rows = [runs[0][name] for name in (*EQUAL, *OTHERS, WIDER)]
    predicted = pool.predict_all([resolve(row.spec) for row in rows], tmp_path)
    for row, made in zip(rows, predicted, strict=True):
        assert made.method == "trace", f"{made.reason} {made.fault}"
        true = [rank.categories.total for rank in row.ranks]
        found = [made.steady_of_ranks[str(rank.rank)] for rank in row.ranks]
        assert found == pytest.approx(true, rel=0.005), row.spec.recipe
        assert made.steady.bytes == max(found) == found[made.rank]
        facts = row.evidence[parse(row.spec.recipe).sharding.name]
        assert passed_on(made) == facts["sent_to_stages_bytes"]


def passed_on(made: Prediction) -> int:
    """Bytes that the predicted rank sends to its neighbours in a step."""
    return sum(w.count * w.bytes // 2 for w in made.work if w.group == 2 and w.bytes)


def test_stages_of_gpus_are_ranks_of_their_own_and_each_waits_for_the_others(tmp_path):
    spec = dataclasses.replace(TWO, device="cuda", processes=4, model="DiT-T/8:depth=4")
    spec = dataclasses.replace(spec, global_batch=8)
    texts = ("pp:stages=4,micro=8", "model_parallel:stages=4")
    rows = [resolve(dataclasses.replace(spec, recipe=text)) for text in texts]
    card = cards.find("RTX-3090")
    for micro, made in zip((8, 1), pool.predict_all(rows, tmp_path), strict=True):
        assert made.method == "trace", f"{made.reason} {made.fault}"
        assert len(set(made.steady_of_ranks.values())) > 1, "ends hold what the middle does not"
        (chain,) = [w for w in made.work if w.kind == "chain"]
        alone = [w for w in made.work if w is not chain]
        busy = sum(
            roofline.seconds([w], card, 4).compute for w in alone if w.phase in roofline.BUSY
        )
        waited = roofline.seconds(made.work, card, 4).compute
        waited -= roofline.seconds(alone, card, 4).compute
        assert waited / (waited + busy) == pytest.approx(idle_share(4, micro))


# ---- saved, and resumed ----


def test_a_checkpoint_is_a_plain_model_s_and_training_goes_on(runs, train_here):
    rows, base = runs
    for name in (SAVED, ON):
        assert rows[name].status is Status.OK, f"{rows[name].reason}\n{rows[name].log_tail}"
    through = rows["pp"]
    assert rows[ON].losses == pytest.approx(through.losses[: len(rows[ON].losses)], rel=1e-6)
    path = max((base / "checkpoints").glob("step-*"))
    files = json.loads((path / INDEX).read_text())["weight_map"]
    saved = {}
    for file in set(files.values()):
        part = load_file(path / file)
        assert {name for name in files if files[name] == file} == part.keys()
        saved |= part
    alone = dataclasses.replace(TWO, recipe="single", processes=1)
    run, _ = train_here(alone, len(rows[ON].losses))
    wanted = dict(run.trained.module.named_parameters())
    assert saved.keys() == wanted.keys()
    averages = load_file(base / "averaged.safetensors")
    kept = run.trained.attached["ema"].full_state()
    assert averages.keys() == kept.keys()
    for name, weight in wanted.items():
        # Adam divides by a gradient's own size: where that is near eps, rounding shows.
        assert (saved[name] - weight).abs().mean() < 1e-6, name
        if name in kept:
            assert (averages[name] - kept[name]).abs().mean() < 1e-6, name


# ---- not in force ----


@pytest.mark.parametrize("case", LOST)
def test_stages_that_are_not_what_was_asked_for_are_noticed(case, runs):
    name, words = LOST[case]
    row = runs[0][name]
    assert row.status is Status.VOID, row.log_tail
    failed = {check.name: check.found for check in row.audit if not check.ok}
    assert words in failed["evidence: pp"]


@pytest.mark.parametrize("case", UNLIKE)
def test_stages_that_are_not_one_training_are_noticed(case, runs):
    row = runs[0][UNLIKE[case]]
    assert row.status is Status.VOID, row.log_tail
    assert verdict(row, runs).word == "DIFFERS"
    reference = runs[0]["ddp"]
    blind = dataclasses.replace(row, losses=reference.losses)
    assert verdict(blind, runs).word == "DIFFERS", "norms and updates tell, whatever losses say"


# ---- cut ----


@pytest.mark.parametrize("count", [2, 4])
def test_a_model_is_cut_into_equal_runs_of_blocks_with_the_whole_model_s_names(count):
    stages = []
    for index in range(count):
        module = SUBJECT.make()
        named = list(dict(module.named_parameters()))
        made = cut.cut(module, SUBJECT.blocks(module), index, count)
        assert cut.cut(module, SUBJECT.blocks(module), index, count) is made
        assert list(made.everywhere(module)) == named
        assert len(SUBJECT.blocks(module)) == SUBJECT.depth // count
        stages.append(set(dict(module.named_parameters())))
    assert set.union(*stages) == set(named) and sum(map(len, stages)) == len(named)
    assert "pos_embed" in stages[0] and "final_layer.linear.weight" in stages[-1]
    assert "blocks.0.attn.qkv.weight" in stages[0]


def test_entering_running_and_leaving_is_the_forward_pass():
    module, sample = SUBJECT.build(0, "awake"), SUBJECT.example("cpu")
    x, t_B, conditions = torch.randn_like(sample[0]), *sample[1:]
    hidden = module.enter(x, t_B, conditions["y"], conditions["drop"])
    out = module.leave(module.run_blocks(module.blocks, *hidden), *hidden[1:])
    assert out.equal(SUBJECT.predict(module, x, t_B, conditions))


# ---- refused ----


@pytest.mark.parametrize(
    ("text", "processes", "wanted"),
    [
        ("pp", 4, ["4 processes are not 2 stages", "--processes 2, or stages=4"]),
        ("pp", 1, ["1 processes are not 2 stages", "or single"]),
        ("pp:stages=3", 3, ["4 blocks are not 3 equal stages", "2 or 4"]),
        ("pp:micro=3,stages=4", 4, ["1f1b fills 4 stages", "micro=4"]),
        ("pp:schedule=interleaved", 2, ["interleaved", "take schedule=1f1b"]),
        ("pp:schedule=zero_bubble", 2, ["zero_bubble", "take schedule=1f1b"]),
        ("pp+accumulate:steps=2", 2, ["leave accumulate out"]),
        ("pp+sp", 2, ["not shown beside", "take ddp"]),
        ("pp+prune", 2, ["masks", "take ddp"]),
        ("pp+backward", 2, ["use single"]),
        ("pp+lora", 2, ["take no gradient", "take ddp"]),
        ("pp+compile", 2, ["compiled graphs", "take ddp"]),
        ("pp+optimizer_in_backward", 2, ["take ddp"]),
    ],
)
def test_what_cannot_be_a_pipeline_is_refused_with_the_way_out(text, processes, wanted):
    spec = dataclasses.replace(TINY, global_batch=48, recipe=text, processes=processes)
    reason = resolve(spec).refusal
    assert reason and [w for w in wanted if w not in reason] == [], reason


def test_a_model_that_cannot_be_cut_is_refused():
    spec = dataclasses.replace(
        TINY, model="DiT-T/8:tokens=512", objective="masked", recipe="pp", processes=2,
        global_batch=8,
    )  # fmt: skip
    assert "cut between its blocks" in resolve(spec).refusal


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("pp:stages=1", "stages is 1; a whole number from 2"),
        ("pp:micro=1", "micro is 1; a whole number from 2; one micro batch at a time is"),
        ("pp:schedule=fast", "schedule is 'fast'; one of gpipe, 1f1b"),
        ("model_parallel:micro=2", "has no parameter 'micro'"),
    ],
)
def test_what_is_no_pipeline_is_refused(text, wanted):
    with pytest.raises(RecipeError, match=wanted):
        parse(text)


@pytest.mark.parametrize("text", ["pp", "pp:stages=4,schedule=gpipe,micro=8", "model_parallel"])
def test_a_pipeline_round_trips_as_text(text):
    recipe = parse(text)
    assert str(recipe) == text and parse(str(recipe)) == recipe
    engine = recipe.launch("cuda", 2, SUBJECT).engine
    assert engine.layout(engine.stages).data == 1
    assert recipe.accumulation == engine.micro


def test_peaks_in_flight_are_those_of_the_schedules():
    peaks = {name: [s.in_flight(i, 4, 8) for i in range(4)] for name, s in SCHEDULES.items()}
    assert peaks == {"gpipe": [8] * 4, "1f1b": [4, 3, 2, 1]}

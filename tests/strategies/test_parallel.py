"""Ranks that share samples are one training, with evidence; where they are not, it is noticed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from conftest import SUBJECT, TINY, Case, against, hold_apart, hold_equal, launched_together

from harness.planner import pool
from harness.resolve import resolve
from harness.result import Result, Status
from tests.made.publics import miniature
from tests.sabotage import HYBRID, RANKS, SHARDED

pytestmark = pytest.mark.thorough

# As in test_runs: what is equal is equal because all clip, decay and step alike.
TWO = dataclasses.replace(
    TINY, model="DiT-T/8:depth=3", recipe="ddp", processes=2, global_batch=8, steps=1,
    learning_rate=1e-3, weight_decay=0.01, beta2=0.99, grad_clip=0.25, ema=0.9,
)  # fmt: skip
FOUR = "fsdp2+sp"
QUARTERS = "ddp+sp:ranks=4"
AGAIN = ["hsdp+checkpoint"]
"""On four ranks, with nothing that is shared but weights."""
EQUAL = ["ddp+sp", "ddp+sp+checkpoint", FOUR, QUARTERS]
OTHERS = ["ddp+sp+bf16+compile:backend=aot_eager"]
WAN = "wan2.1-1.3b"
PUBLIC = {
    WAN: "fsdp2+sp+checkpoint",
    "sd3.5-medium": "ddp+sp",
    "qwen-image": "ddp+sp+checkpoint",
}
"""Public models in miniature, whose attention is exchanged where torch computes it."""
TOKENS = dataclasses.replace(
    TWO, model="DiT-T/8:depth=3,tokens=64", objective="masked", data="synthetic:32", recipe="ddp+sp"
)
LOST = {
    "attention stays within a part": ("sp", "attention_of_own_tokens"),
    "one part's positions for all": ("", "positions_of_the_first_part"),
    "gradients stay within a part": ("ddp", "gradients_not_averaged"),
}
"""What ``ddp+sp`` does instead -> whose evidence notices beside parity, the sabotage."""
SEEN = {
    "one_block_not_reduced": {"evidence: fsdp2"},  # its reduction was not there
    "groups_not_averaged": {"evidence: hsdp"},  # they drifted apart
}
"""Sabotaged replicas and shards -> who notices beside parity."""
OWN_SAMPLES, LEFT_OUT = "samples_of_their_own", "a rank's shares left out"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[dict[str, Result], Path]:
    """Name -> result, and where the folders of those names are."""
    base = tmp_path_factory.mktemp("parallel")

    def case(recipe: str, *words: str, fault: str = "") -> Case:
        ranks = 4 if recipe in (FOUR, QUARTERS, "hsdp", *AGAIN) else 2
        return Case(dataclasses.replace(TWO, recipe=recipe, processes=ranks), words, fault=fault)

    cases = {recipe: case(recipe) for recipe in ("ddp", *EQUAL, *OTHERS, *AGAIN)}
    cases |= {name: case("ddp+sp", fault=name) for _, name in LOST.values()}
    for recipe, names in (("ddp", RANKS), ("fsdp2", SHARDED), ("hsdp", HYBRID)):
        cases |= {name: case(recipe, fault=name) for name in names}
    cases[LEFT_OUT] = case("fsdp2", fault=next(iter(RANKS)))
    cases[OWN_SAMPLES] = case("ddp+sp", fault=OWN_SAMPLES)
    cases["tokens"] = Case(TOKENS)
    for name, text in PUBLIC.items():
        ranks = 4 if "fsdp2" in text else 2
        cases[name] = Case(miniature(name, text, processes=ranks))
    saving = case("ddp+sp", "--checkpoint", str(base / "saved" / "checkpoint"))
    cases["saved"] = dataclasses.replace(saving, spec=dataclasses.replace(saving.spec, steps=3))
    return launched_together(cases, base), base


# ---- in force ----


@pytest.mark.parametrize("row", [*EQUAL, *OTHERS], indirect=True)
def test_ranks_that_share_samples_show_it(row):
    assert [check for check in row.audit if not check.ok] == []
    asked = {check.name: check.asked for check in row.audit}
    layout = resolve(row.spec).launch.layout
    parts = layout.sequence
    assert asked["samples shared alike"] is True and parts == (4 if "=4" in row.spec.recipe else 2)
    assert asked["micro batch"] == [row.spec.global_batch // layout.data // row.accumulation]
    facts = row.evidence["sp"]
    if "compile" not in row.spec.recipe:
        whole = SUBJECT.survey
        assert facts["heads_inside"] == 4 // parts and facts["tokens_inside"] == whole.tokens
        again = 8.0 if "checkpoint" in row.spec.recipe else 4.0
        assert facts["exchanges_an_attention"] == {"forward": 4.0, "backward": again}


@pytest.mark.parametrize("row", [*EQUAL, *AGAIN], indirect=True)
def test_losses_gradients_and_updates_are_those_of_whole_samples(row, runs):
    hold_equal(row, runs[0]["ddp"])


def test_memory_is_predicted_and_activations_are_a_share_of_the_tokens(runs, tmp_path):
    names = ("ddp+sp+checkpoint", FOUR, QUARTERS, WAN)
    rows = [runs[0][name] for name in names]
    one = dataclasses.replace(TWO, model="DiT-T/2", data="synthetic:64", global_batch=1)
    alone = dataclasses.replace(one, recipe="single", processes=1)
    shared = dataclasses.replace(one, recipe="ddp+sp")
    specs = [*(row.spec for row in rows), alone, shared]
    *predicted, whole, half = pool.predict_all([resolve(spec) for spec in specs], tmp_path)
    for row, found in zip(rows, predicted, strict=True):
        assert found.method == "trace", found.reason
        assert row.status is Status.OK, row.reason
        close = 0.01 if row.spec.model == WAN else 0.005  # a miniature: 2 kB of 0.4 MB
        assert found.steady.bytes == pytest.approx(row.ranks[0].categories.total, rel=close)
    buckets = 4 * resolve(alone).subject.survey.sizes.total
    kept = [max(one.beyond.values()) for one in (whole, half)]
    assert kept[1] - buckets == pytest.approx(kept[0] / 2, rel=0.15)


@pytest.mark.parametrize("row", [*PUBLIC, "tokens"], indirect=True)
def test_other_models_are_shared_as_well(row, train_here):
    """Of tokens, hidden ones lie unequally in the parts, and the loss is that of all the same."""
    assert [check for check in row.audit if not check.ok] == []
    assert row.evidence["sp"]["exchanges_an_attention"]["forward"] == 4.0
    alone = "+".join(["single", *row.spec.recipe.split("+")[2:]])
    run = train_here(dataclasses.replace(row.spec, recipe=alone, processes=1), 2)
    assert row.losses[:2] == pytest.approx(run.all_losses(), rel=1e-5)
    assert row.grad_norms[:2] == pytest.approx(run.all_norms(), rel=2e-5)


# ---- not in force ----


@pytest.mark.parametrize("case", LOST)
def test_parts_that_are_not_one_training_are_noticed(case, runs):
    name, sabotage = LOST[case]
    row = runs[0][sabotage]
    failed = {check.name for check in row.audit if not check.ok}
    assert not name or f"evidence: {name}" in failed
    hold_apart(row, runs[0]["ddp"])


def test_ranks_that_were_to_share_samples_and_did_not_are_noticed(runs):
    row = runs[0][OWN_SAMPLES]
    failed = {check.name: check.found for check in row.audit if not check.ok}
    assert failed["samples shared alike"] is False
    assert against(row, runs[0]["ddp"]).word == "DIFFERS"


@pytest.mark.parametrize("name", [*RANKS, *SHARDED, *HYBRID, LEFT_OUT])
def test_replicas_and_shards_that_are_not_one_training_differ(name, runs):
    """Parity tells, of most alone."""
    row = runs[0][name]
    failed = {check.name for check in row.audit if not check.ok} - {"untouched"}
    assert row.status is Status.VOID and failed == SEEN.get(name, set()), row.log_tail
    assert against(row, runs[0]["ddp"]).word == "DIFFERS"
    if name not in RANKS:
        hold_apart(row, runs[0]["ddp"])

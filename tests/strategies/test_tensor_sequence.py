"""Ranks that share weights and samples: real ones held to ddp's losses, norms and updates, each
with evidence of both; the ways in which they can fail to be one training; and what is saved.

The runs share a start (``launched_together``).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from conftest import TINY, Case, hold_alike, hold_apart, hold_equal, launched_together
from safetensors.torch import load_file

from harness.planner import pool
from harness.resolve import resolve
from harness.result import Result, Status
from strategies.launch_file import Layout

pytestmark = pytest.mark.thorough

# As in test_runs: what is equal is equal because all clip, decay and step alike.
FOUR = dataclasses.replace(
    TINY, model="DiT-T/8:depth=2", recipe="ddp", processes=4, global_batch=8, steps=1,
    learning_rate=1e-3, weight_decay=0.01, beta2=0.99, grad_clip=0.25, ema=0.9,
)  # fmt: skip
BOTH, SHARDED = "ddp+tp+sp", "fsdp2+tp+sp+checkpoint"
TOKENS, RING = "ddp+tp:norms=tokens+sp:how=gather+checkpoint", "ddp+tp+sp:how=ring+accumulate"
EQUAL = [BOTH, TOKENS, RING, SHARDED]
HALF, PLAIN_HALF = "ddp+tp+sp+bf16+checkpoint", "ddp+bf16"
EIGHT = "two pairs of pairs"
LOST = {"attention_of_own_tokens": "sp", "products_not_summed": "tp", "gradients_not_averaged": ""}
"""Sabotage -> the part whose evidence must fail; "": parity alone must tell."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[dict[str, Result], Path]:
    """Name -> result, and where the folders of those names are."""
    base = tmp_path_factory.mktemp("both")

    def case(recipe: str, *words: str, **more) -> Case:
        return Case(dataclasses.replace(FOUR, recipe=recipe, **more), words)

    cases = {recipe: case(recipe) for recipe in ("ddp", PLAIN_HALF, *EQUAL, HALF)}
    cases[EIGHT] = case(BOTH, processes=8)
    cases |= {name: case(BOTH, "--sabotage", name) for name in LOST}
    words = ("--checkpoint", str(base / "saved" / "checkpoint"), "--averaged", str(base / "mean"))
    cases["saved"] = case(BOTH, *words, steps=3)
    return launched_together(cases, base), base


# ---- in force ----


@pytest.mark.parametrize("row", [*EQUAL, HALF, EIGHT], indirect=True)
def test_ranks_that_share_weights_and_samples_show_both(row):
    assert [check for check in row.audit if not check.ok] == []
    asked = {check.name: check.asked for check in row.audit}
    layout = resolve(row.spec).launch.layout
    assert (layout.tensor, layout.sequence) == (2, 2) and asked["samples shared alike"] is True
    assert layout.data == row.spec.processes // 4
    weights, samples = row.evidence["tp"], row.evidence["sp"]
    assert (weights["ranks_a_weight"], samples["ranks_a_sample"]) == (2, 2)
    limit = 1e-2 if "bf16" in row.spec.recipe else 1e-5
    assert 0 <= weights["away_from_whole_blocks"] < limit
    assert 0 <= samples["away_from_the_whole"] < limit
    assert weights["spread_of_whole_weights"] == 0.0
    # Of 4 heads and 16 tokens: tp has half of the heads, and ulysses half of those.
    ulysses, gathers = "how" not in row.spec.recipe, "gather" in row.spec.recipe
    inside = tuple(samples[f"{what}_inside"] for what in ("heads", "queries", "keys"))
    assert inside == ((1, 16, 16) if ulysses else (2, 8, 16 if gathers else 8))
    by_tokens = "norms" in row.spec.recipe
    assert samples["tokens_in_blocks"] == (4 if by_tokens else 8)
    assert weights.get("tokens_between") == (4 if by_tokens else None)
    assert weights["sums_a_block"]["backward"] > 0


@pytest.mark.parametrize("row", [*EQUAL, EIGHT], indirect=True)
def test_losses_gradients_and_updates_are_those_of_one_training(row, runs):
    hold_equal(row, runs[0]["ddp"])


def test_losses_of_rounded_products_are_as_close_as_rounding(runs):
    row, plain = runs[0][HALF], runs[0][PLAIN_HALF]
    assert row.losses == pytest.approx(plain.losses, rel=1e-3)
    assert row.grad_norms == pytest.approx(plain.grad_norms, rel=1e-2)


def test_what_is_saved_is_a_plain_model_s(runs, train_here):
    row, base = runs[0]["saved"], runs[1]
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    saved = load_file(next((base / "saved").rglob("model.safetensors")))
    run, _ = train_here(dataclasses.replace(FOUR, recipe="single", processes=1), len(row.losses))
    wanted = dict(run.trained.module.named_parameters())
    hold_alike(saved, wanted, 2e-6)
    free = [name for name, p in wanted.items() if p.requires_grad]
    average = dict(zip(free, run.trained.attached["ema"].shards, strict=True))
    hold_alike(load_file(base / "mean"), average, 2e-6)


# ---- predicted ----


def test_memory_is_predicted_and_what_is_sent_has_its_ranks(runs, tmp_path):
    rows = [runs[0][name] for name in (*EQUAL, EIGHT)]
    gpus = dataclasses.replace(
        FOUR, recipe=f"{BOTH}+bf16+checkpoint", device="cuda", processes=8, data="synthetic"
    )
    specs = [*(row.spec for row in rows), gpus]
    *found, on_gpus = pool.predict_all([resolve(spec) for spec in specs], tmp_path)
    for row, predicted in zip(rows, found, strict=True):
        assert predicted.method == "trace", predicted.reason
        assert predicted.steady.bytes == pytest.approx(row.ranks[0].categories.total, rel=0.005)
    width, depth = 128, 2
    for predicted in (found[-1], on_gpus):
        assert predicted.method == "trace", predicted.reason
        steps = [w for w in predicted.work if w.phase in ("forward", "backward")]
        places = {(w.kind, w.group, w.stride) for w in steps if w.group}
        # Sums among neighbours, exchanges of two ranks two apart, gradients among all alike.
        wanted = {("collective", 2, 1), ("collective", 2, 2), ("overlapped", 4, 2)}
        assert places == wanted
    sent = [w for w in found[-1].work if w.kind == "collective" and w.phase == "forward"]
    stripe = 4 * (FOUR.global_batch // 2) * (16 // 2) * width
    # An all-reduce counts twice. Queries, keys, values and outputs are of half of the heads.
    for stride, size in ((1, 2 * 2 * stripe), (2, 4 * stripe // 2)):
        assert sum(w.bytes * w.count for w in sent if w.stride == stride) == depth * size


# ---- not in force ----


@pytest.mark.parametrize("name", LOST)
def test_an_exchange_that_is_left_out_is_noticed(name, runs):
    row = runs[0][name]
    hold_apart(row, runs[0]["ddp"])
    failed = {check.name for check in row.audit if not check.ok}
    assert any(check.startswith(f"evidence: {LOST[name]}") for check in failed)


# ---- refused ----


@pytest.mark.parametrize(
    ("text", "processes", "wanted"),
    [
        (
            BOTH,
            6,
            ["6 processes are not groups of 4", "sp:ranks=2 times tp:ranks=2", "--processes 4"],
        ),
        ("hsdp+tp+sp", 4, ["4 processes are not 2 copies of groups of 4", "--processes 8"]),
        ("ddp+tp+sp:ranks=4", 8, ["2 heads on each rank of tp:ranks=2", "4 ranks", "how=gather"]),
        ("zero3+tp+sp", 4, ["zero3 shards weights in a way of its own", "take ddp or fsdp2"]),
        (f"{BOTH}+compile", 4, ["leave compile out"]),
    ],
)
def test_what_cannot_be_shared_twice_is_refused_with_the_way_out(text, processes, wanted):
    spec = dataclasses.replace(TINY, global_batch=12, recipe=text, processes=processes)
    reason = str(resolve(spec).refusal)
    assert reason and [w for w in wanted if w not in reason] == []


def test_attention_that_torch_computes_is_not_cut_twice():
    model = {"model": "flux-dev", "data": "synthetic", "objective": "flow"}
    reason = str(resolve(dataclasses.replace(FOUR, recipe=BOTH, **model)).refusal)
    assert reason.startswith("sp: ") and reason.endswith("leave sp or tp out")


def test_tokens_of_a_stripe_that_cannot_be_dealt_are_refused():
    text = "ddp+tp:norms=tokens+sp:ranks=3,how=gather"
    odd = dataclasses.replace(FOUR, recipe=text, processes=6, data="synthetic:24")
    said = "3 tokens on each rank of sp:ranks=3 are not 2 equal stripes; take norms=whole"
    assert str(resolve(odd).refusal) == f"tp: {said}"


@pytest.mark.parametrize(
    ("layout", "cut"),
    [
        (Layout(replicate=8), Layout(replicate=2, sequence=2, tensor=2)),
        (Layout(replicate=2, shard=4), Layout(replicate=2, sequence=2, tensor=2)),
        (Layout(replicate=2, shard=2), Layout(replicate=2, shard=2)),
    ],
)
def test_a_layout_is_cut_twice_or_not_at_all(layout, cut):
    assert layout.cut(sequence=2, tensor=2) == cut

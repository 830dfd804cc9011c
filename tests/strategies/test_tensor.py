"""Ranks that share weights are one model, with evidence, also when saved; else it is noticed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from conftest import TINY, Case, hold_alike, hold_apart, hold_equal, launched_together
from safetensors.torch import load_file

from harness.planner import pool
from harness.resolve import resolve
from harness.result import Result, Status
from strategies.parallel.tensor import parallelize
from tests.made.publics import miniature
from tests.sabotage import CUT

pytestmark = pytest.mark.thorough

# As in test_runs: what is equal is equal because all clip, decay and step alike.
FOUR = dataclasses.replace(
    TINY, model="DiT-T/8:depth=2", recipe="ddp", processes=4, global_batch=8, steps=1,
    learning_rate=1e-3, weight_decay=0.01, beta2=0.99, grad_clip=0.25, ema=0.9,
)  # fmt: skip
PLAIN, BOTH = "fsdp2+tp", "fsdp2+tp+sp"
EQUAL = [
    PLAIN,
    "fsdp2+tp+checkpoint+attend:kernel=naive",
    "fsdp2:reshard=off+tp+accumulate",
    BOTH,
]
TOKENS = dataclasses.replace(
    FOUR, recipe=PLAIN, model="DiT-T/8:depth=2,tokens=500", objective="masked", data="synthetic"
)
HALF = "step-00000002"


SUMS = ("products_not_summed", "gradients_not_summed")
REACHED = ["flux2-dev", "qwen-image"]
"""Miniatures besides Flux that diffusers has a plan for."""


def spec_of(recipe: str, **more):
    return dataclasses.replace(FOUR, recipe=recipe, **more)


def flux(recipe: str):
    more = {"grad_clip": 0.25, "beta2": 0.99, "weight_decay": 0.01, "ema": 0.9}
    return miniature("flux-dev", recipe, processes=4, steps=1, **more)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[dict[str, Result], Path]:
    """Name -> result, and the folder; "again" goes on from what "saved" left after two steps."""
    base = tmp_path_factory.mktemp("tensor")
    cases = {recipe: Case(spec_of(recipe)) for recipe in ("ddp", *EQUAL)}
    cases |= {name: Case(spec_of(PLAIN), fault=name) for name in CUT}
    cases["tokens"] = Case(TOKENS)
    state = base / "state"
    words = ("--checkpoint", str(state / "saved"), "--save-every", "2")
    averaged = ("--averaged", str(state / "averaged"), "--trained", str(state / "trained"))
    cases["saved"] = Case(spec_of(PLAIN, steps=3), (*words, *averaged))
    again = ("--checkpoint", str(state / "again"), "--save-every", "2", "--resume")
    copied = ((state / "saved" / HALF, state / "again" / HALF),)
    (state / "again").mkdir(parents=True)
    cases["again"] = Case(spec_of(PLAIN, steps=3), again, copied)
    cases |= {f"flux {recipe}": Case(flux(recipe)) for recipe in ("ddp", PLAIN)}
    cases |= {f"flux {name}": Case(flux(PLAIN), fault=name) for name in SUMS}
    cases |= {name: Case(miniature(name, PLAIN, processes=4)) for name in REACHED}
    return launched_together(cases, base), base


# ---- in force ----


@pytest.mark.parametrize("row", EQUAL, indirect=True)
def test_ranks_that_share_weights_show_it(row):
    assert [check for check in row.audit if not check.ok] == []
    asked = {check.name: check.asked for check in row.audit}
    layout, facts = resolve(row.spec).launch.layout, row.evidence["tp"]
    assert asked["samples shared alike"] is True and layout.tensor == 2
    assert asked["micro batch"] == [row.spec.global_batch // layout.data // row.accumulation]
    width, depth = 128, 2
    # Of a block's 18 squares of the width 12 are cut, into four.
    assert facts["cut_elements"] == 12 * width**2 * depth // 4
    # keep=nothing runs the first of two blocks twice more.
    again = {"nothing": 5.0, "checkpoint": 4.0}
    backward = next((n for word, n in again.items() if word in row.spec.recipe), 2.0)
    assert facts["sums_a_block"] == {"forward": 2.0, "backward": backward}
    if row.spec.recipe == BOTH:
        heads = row.evidence["sp"]["heads_inside"]
        assert heads == 4 // layout.tensor // layout.sequence


@pytest.mark.parametrize("row", EQUAL, indirect=True)
def test_losses_gradients_and_updates_are_those_of_whole_weights(row, runs):
    hold_equal(row, runs[0]["ddp"])


@pytest.mark.parametrize("row", [f"flux {PLAIN}"], indirect=True)
def test_flux_is_cut_and_trains_as_whole(row, runs):
    assert [check for check in row.audit if not check.ok] == []
    facts = row.evidence["tp"]
    # A double block sums attention and MLP of the image and of the text, a single block once.
    assert facts["sums_a_block"]["forward"] == 2.5
    hold_equal(row, runs[0]["flux ddp"])


@pytest.mark.parametrize("row", [*REACHED, "tokens"], indirect=True)
def test_other_models_train_as_one_process_does(row, train_here):
    assert [check for check in row.audit if not check.ok] == []
    alone = dataclasses.replace(row.spec, recipe="single", processes=1)
    run = train_here(alone, len(row.losses))
    assert row.losses == pytest.approx(run.all_losses(), rel=1e-4)
    assert row.grad_norms == pytest.approx(run.all_norms(), rel=1e-4)


def test_what_is_saved_is_a_plain_model_s(runs, train_here):
    row, folder = runs[0]["saved"], runs[1] / "state"
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    alone = dataclasses.replace(FOUR, recipe="single", processes=1)
    run = train_here(alone, len(row.losses))
    free = {n: p for n, p in run.module.named_parameters() if p.requires_grad}
    average = dict(zip(free, run.attached["ema"].shards, strict=True))
    hold_alike(load_file(folder / "trained"), free, 2e-6)
    hold_alike(load_file(folder / "averaged"), average, 2e-6)


def test_a_resumed_training_goes_on_as_if_never_stopped(runs):
    saved, again = (runs[0][name] for name in ("saved", "again"))
    assert again.status is Status.OK, f"{again.reason}\n{again.log_tail}"
    assert len(again.losses) == 4 and len(set(again.losses)) == 4
    assert again.losses == pytest.approx(saved.losses, rel=1e-6)
    assert again.grad_norms == pytest.approx(saved.grad_norms, rel=1e-6)
    assert [check for check in again.audit if not check.ok] == []


def test_memory_is_predicted_and_what_is_sent_is_priced(runs, tmp_path):
    rows = [runs[0][name] for name in EQUAL]
    gpus = dataclasses.replace(FOUR, device="cuda", processes=8, data="synthetic", global_batch=16)
    specs = [*(row.spec for row in rows), dataclasses.replace(gpus, recipe="fsdp2+tp+bf16")]
    *found, wide = pool.predict_all([resolve(spec) for spec in specs], tmp_path)
    for row, predicted in zip(rows, found, strict=True):
        assert predicted.method == "trace", predicted.reason
        assert row.status is Status.OK, row.reason
        assert predicted.steady.bytes == pytest.approx(row.ranks[0].categories.total, rel=0.005)
    # Pairs that share weights sit side by side, those that shard the same part two apart.
    sent = [w for w in found[0].work if w.kind == "collective" and w.phase != "optimizer"]
    assert {(w.group, w.stride) for w in sent} == {(2, 1), (2, 2)}
    tokens, width, depth = 16, 128, 2
    summed = sum(w.bytes * w.count for w in sent if w.stride == 1)
    assert summed == 2 * 2 * depth * 2 * 4 * (FOUR.global_batch // 2) * tokens * width
    # On GPUs sums are awaited, and shards gathered beside the blocks.
    wire = ("collective", "overlapped")
    phases = ("forward", "backward")
    work = [w for w in wide.work if w.kind in wire and w.phase in phases]
    assert {(w.kind, w.group, w.stride) for w in work} == {
        ("collective", 2, 1), ("overlapped", 4, 2),
    }, wide.reason  # fmt: skip


# ---- not in force ----


@pytest.mark.parametrize("name", [*CUT, *(f"flux {name}" for name in SUMS)])
def test_parts_that_are_not_one_model_are_noticed(name, runs):
    """By parity; where a sum is missing by evidence too."""
    hold_apart(runs[0][name], runs[0]["flux ddp" if "flux" in name else "ddp"])
    failed = " ".join(check.name for check in runs[0][name].audit if not check.ok)
    assert "evidence: tp" in failed or not name.endswith(SUMS)


# ---- refused ----


def test_a_model_without_a_plan_is_refused():
    said = str(resolve(miniature("wan2.1-1.3b", PLAIN, processes=2)).refusal)
    assert "has no plan of diffusers" in said and "leave tp out" in said


def test_an_uneven_mlp_is_refused_before_anything_starts(monkeypatch):
    """No preset has one: a subject of one's own may."""
    size = resolve(FOUR).subject.survey._replace(inner=258)
    monkeypatch.setattr(type(resolve(FOUR).subject), "survey", size)
    refused = str(resolve(spec_of("fsdp2+tp:ranks=4", processes=8)).refusal)
    assert refused.endswith("MLP cannot be dealt to 4 ranks; take ranks of 2")


# ---- parts ----


@pytest.mark.parametrize(("axis", "pieces"), [(0, (4, 4, 4)), (0, (2, 10)), (1, (2, 6))])
def test_a_packed_weight_in_the_order_of_ranks_is_the_plain_one_again(axis, pieces):
    plain = torch.arange(12 * 8).view(12, 8)
    p = torch.nn.Parameter(plain.float())
    p.order = (axis, pieces, 2)
    sorted_ = plain.index_select(axis, parallelize.order_of(p))
    first = sorted_.chunk(2, axis)[0]
    halves = [piece.chunk(2, axis)[0] for piece in plain.split(pieces, axis)]
    assert first.equal(torch.cat(halves, axis)), "a half of every piece"
    assert parallelize.whole(sorted_, p).equal(plain)

"""Ranks that share weights: real ones held to ddp's losses, norms and updates, each with evidence;
the ways in which their parts can fail to be one model, each of which must be noticed; and what is
saved, which is a plain model's.

The runs share a start (``launched_together``).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from conftest import TINY, Case, hold_alike, hold_apart, hold_equal, launched_together
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from harness.planner import pool
from harness.resolve import resolve
from harness.result import Result, Status
from strategies import CATALOG, parse
from strategies.parallel.tensor.layers import Share
from strategies.recipe import RecipeError
from tests.made.recipes import SETTINGS
from tests.made.stubs.parallel import LOST_PARTS
from tests.sabotage.ranks import BETWEEN, CUT

pytestmark = pytest.mark.thorough

# As in test_runs: what is equal is equal because all clip, decay and step alike.
TWO = dataclasses.replace(
    TINY, model="DiT-T/8:depth=2", recipe="ddp", processes=2, global_batch=8, steps=1,
    learning_rate=1e-3, weight_decay=0.01, beta2=0.99, grad_clip=0.25, ema=0.9,
)  # fmt: skip
FOUR, QUARTERS, BOTH = "ddp+tp+checkpoint", "ddp+tp:ranks=4", "fsdp2+tp"
BY_TOKENS = ["ddp+tp:norms=tokens", "fsdp2+tp:norms=tokens+checkpoint"]
EQUAL = ["ddp+tp", FOUR, QUARTERS, "ddp+tp+attend:kernel=naive+accumulate", BOTH, *BY_TOKENS]
SHARDED = "fsdp2:reshard=off+tp+bf16+checkpoint+accumulate"
OTHERS = ["ddp+tp+bf16+checkpoint:keep=nothing", "ddp+tp:norms=tokens+bf16_pure", SHARDED]
TOKENS = dataclasses.replace(
    TWO, recipe="ddp+tp", model="DiT-T/8:depth=2,tokens=500", objective="masked", data="synthetic"
)
HALF = "step-00000002"
SAVING = ("ddp+tp", BOTH)
CUT_AS_THEY_LIE = "heads_dealt_as_they_lie"
FAINT, LONGER = "norm_of_own_parts", "ddp, longer"
"""What moves a norm by 1e-4 at most: noticed after more steps, beside a reference of as many."""


def spec_of(recipe: str, **more):
    ranks = 4 if recipe in (FOUR, QUARTERS) or "fsdp2" in recipe else 2
    if recipe == OTHERS[0]:  # halves of two blocks are run again as often as wholes
        more["model"] = TINY.model
    return dataclasses.replace(TWO, recipe=recipe, processes=ranks, **more)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[dict[str, Result], Path]:
    """Name -> result, and where the folders of those names are: each recipe, each sabotage, and for
    each of ``SAVING`` what it saved after two steps and four, and "again", which goes on from two.
    """
    base = tmp_path_factory.mktemp("tensor")
    cases = {recipe: Case(spec_of(recipe)) for recipe in ("ddp", *EQUAL, *OTHERS)}
    cases |= {name: Case(spec_of("ddp+tp"), ("--sabotage", name)) for name in CUT}
    cases |= {name: Case(spec_of(BY_TOKENS[0]), ("--sabotage", name)) for name in BETWEEN}
    longer = dataclasses.replace(TWO, model=TINY.model, steps=3)
    cases[LONGER] = Case(longer)
    cases[FAINT] = Case(dataclasses.replace(longer, recipe="ddp+tp"), ("--sabotage", FAINT))
    cases["tokens"] = Case(TOKENS)
    cases["dealt among shards"] = Case(spec_of(BOTH), ("--sabotage", CUT_AS_THEY_LIE))
    for recipe in SAVING:
        state = base / "state" / recipe
        words = ("--checkpoint", str(state / "saved"), "--save-every", "2")
        averaged = ("--averaged", str(state / "averaged"), "--trained", str(state / "trained"))
        cases[f"saved {recipe}"] = Case(spec_of(recipe, steps=3), (*words, *averaged))
        again = ("--checkpoint", str(state / "again"), "--save-every", "2", "--resume")
        copied = ((state / "saved" / HALF, state / "again" / HALF),)
        (state / "again").mkdir(parents=True)
        cases[f"again {recipe}"] = Case(spec_of(recipe, steps=3), again, copied)
    return launched_together(cases, base), base


# ---- in force ----


def again(row) -> float:
    """Sums in a block's backward: with those of forward again, where it is recomputed."""
    return {FOUR: 4.0, OTHERS[0]: 5.0, SHARDED: 4.0, BY_TOKENS[1]: 4.0}.get(row.spec.recipe, 2.0)


@pytest.mark.parametrize("row", [*EQUAL, *OTHERS], indirect=True)
def test_ranks_that_share_weights_show_it(row):
    assert [check for check in row.audit if not check.ok] == []
    asked = {check.name: check.asked for check in row.audit}
    layout, facts = resolve(row.spec).launch.layout, row.evidence["tp"]
    assert asked["samples shared alike"] is True and facts["ranks_a_weight"] == layout.tensor
    assert asked["micro batch"] == [row.spec.global_batch // layout.data // row.accumulation]
    assert facts["data_parallel"] == layout.data == row.spec.processes // layout.tensor
    # Of a block's 18 squares of the width 6 are modulation, which is whole.
    share = (6 + 12 / layout.tensor) / 18
    assert facts["share_of_a_block"] == pytest.approx(share, abs=2e-3)
    assert facts["spread_of_whole_weights"] == 0.0
    limit = 1e-2 if "bf16" in row.spec.recipe else 1e-5
    assert 0 <= facts["away_from_whole_blocks"] < limit
    if "norms" not in row.spec.recipe:
        assert facts["sums_a_block"] == {"forward": 2.0, "backward": again(row)}
    else:
        more = again(row) - 2.0
        assert facts["gathers_a_block"] == {"forward": 2.0, "backward": 4.0 + more}
        assert facts["scatters_a_block"] == {"forward": 2.0, "backward": 2.0 + more}
        assert facts["sums_a_block"] == {"backward": 1.0} and facts["tokens_between"] == 8
    if "naive" not in row.spec.recipe:
        assert facts["heads_inside"] == 4 // layout.tensor


@pytest.mark.parametrize("row", EQUAL, indirect=True)
def test_losses_gradients_and_updates_are_those_of_whole_weights(row, runs):
    hold_equal(row, runs[0]["ddp"])


@pytest.mark.parametrize("recipe", SAVING)
def test_what_is_saved_is_a_plain_model_s(recipe, runs, train_here, tmp_path):
    row, folder = runs[0][f"saved {recipe}"], runs[1] / "state" / recipe
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    alone = dataclasses.replace(TWO, recipe="single", processes=1)
    run, _ = train_here(alone, len(row.losses))
    wanted = dict(run.trained.module.named_parameters())
    saved, state = saved_state(max((folder / "saved").iterdir()), tmp_path / "joined", list(wanted))
    free = {name: p for name, p in wanted.items() if p.requires_grad}
    average = dict(zip(free, run.trained.attached["ema"].shards, strict=True))
    kept = [(saved, wanted), (load_file(folder / "trained"), free)]
    kept.append((load_file(folder / "averaged"), average))
    for found, whole in kept:
        hold_alike(found, whole, 2e-6)
    mine = run.trained.inner_optimizer.state
    for moments, p in zip(state, free.values(), strict=True):
        assert moments["exp_avg"].shape == p.shape
        assert (moments["exp_avg"] - mine[p]["exp_avg"]).abs().max() < 1e-6


def saved_state(folder: Path, joined: Path, names: list[str]) -> tuple[dict, list]:
    """The weights of a checkpoint by name, and what the optimizer kept of each trained one, as
    anybody would read them who knows of no parts: a plain file, or torch's distributed ones."""
    if (folder / "model.safetensors").exists():
        state = torch.load(folder / "optimizer.bin", weights_only=True)["state"]
        return load_file(folder / "model.safetensors"), list(state.values())
    found = {}
    for kind, name in (("model", "pytorch_model_fsdp_0"), ("optimizer", "optimizer_0")):
        dcp_to_torch_save(folder / name, joined)
        found[kind] = torch.load(joined, weights_only=True)[kind]
    state = found["optimizer"]["state"]
    return found["model"], [state[name] for name in names if name in state]


@pytest.mark.parametrize("recipe", SAVING)
def test_a_resumed_training_goes_on_as_if_never_stopped(recipe, runs):
    saved, again = (runs[0][f"{name} {recipe}"] for name in ("saved", "again"))
    assert again.status is Status.OK, f"{again.reason}\n{again.log_tail}"
    assert len(again.losses) == 4 and len(set(again.losses)) == 4
    assert again.losses == pytest.approx(saved.losses, rel=1e-6)
    assert again.grad_norms == pytest.approx(saved.grad_norms, rel=1e-6)
    assert [check for check in again.audit if not check.ok] == []


def test_memory_is_predicted_and_what_is_sent_is_priced(runs, tmp_path):
    rows = [runs[0][name] for name in (FOUR, BY_TOKENS[1], BOTH)]
    wide = dataclasses.replace(TWO, processes=8, recipe="ddp+tp:ranks=4", global_batch=8)
    specs = [*(row.spec for row in rows), wide, dataclasses.replace(wide, recipe="ddp")]
    *found, eight, plain = pool.predict_all([resolve(spec) for spec in specs], tmp_path)
    for row, predicted in zip(rows, found, strict=True):
        assert predicted.method == "trace", predicted.reason
        assert row.status is Status.OK, row.reason
        assert predicted.steady.bytes == pytest.approx(row.ranks[0].categories.total, rel=0.005)
    assert eight.steady.bytes < plain.steady.bytes
    tokens, width, depth = 16, 128, 2
    within = [w for w in eight.work if w.kind == "collective" and w.group == 4]
    sums = {
        phase: sum(w.bytes * w.count for w in within if w.phase == phase)
        for phase in ("forward", "backward")
    }
    micro = wide.global_batch // 2
    assert sums == dict.fromkeys(sums, 2 * depth * 2 * 4 * micro * tokens * width)
    assert {w.stride for w in within} == {1}
    averaged = [w for w in eight.work if w.kind == "overlapped"]
    assert [(w.group, w.stride) for w in averaged] == [(2, 4)]
    # Pairs that share weights sit side by side, those that shard the same part two apart.
    sent = [w for w in found[-1].work if w.kind == "collective" and w.phase != "optimizer"]
    assert {(w.group, w.stride) for w in sent} == {(2, 1), (2, 2)}
    summed = sum(w.bytes * w.count for w in sent if w.stride == 1)
    assert summed == 2 * 2 * depth * 2 * 4 * (TWO.global_batch // 2) * tokens * width


def test_on_gpus_sums_are_awaited_and_shards_gathered_beside(tmp_path):
    texts = ("fsdp2+tp+bf16", "ddp+tp:norms=tokens+bf16")
    gpus = dataclasses.replace(TWO, device="cuda", processes=8, data="synthetic", global_batch=16)
    specs = [dataclasses.replace(gpus, recipe=text) for text in texts]
    both, own = pool.predict_all([resolve(spec) for spec in specs], tmp_path)
    sent = {(w.kind, w.group, w.stride) for w in both.work if w.phase in ("forward", "backward")}
    wire = {place for place in sent if place[0] in ("collective", "overlapped")}
    assert wire == {("collective", 2, 1), ("overlapped", 4, 2)}, both.reason
    assert own.method == "trace", own.reason


def test_a_model_over_tokens_is_cut_as_well(runs, train_here):
    row = runs[0]["tokens"]
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    assert row.evidence["tp"]["away_from_whole_blocks"] < 1e-5
    alone = dataclasses.replace(TOKENS, recipe="single", processes=1)
    run, log = train_here(alone, 2)
    assert row.losses[:2] == pytest.approx(log.all_losses(run), rel=1e-5)
    assert row.grad_norms[:2] == pytest.approx(log.all_norms(), rel=2e-5)


# ---- not in force ----


@pytest.mark.parametrize("name", [*CUT, *BETWEEN, "dealt among shards"])
def test_parts_that_are_not_one_model_are_noticed(name, runs):
    hold_apart(runs[0][name], runs[0][LONGER if name == FAINT else "ddp"])


@pytest.mark.parametrize("case", LOST_PARTS)
def test_evidence_is_lost_where_a_sum_is(case, runs):
    name, sabotage = LOST_PARTS[case]
    failed = {check.name for check in runs[0][sabotage].audit if not check.ok}
    assert any(check.startswith(f"evidence: {name}") for check in failed)


# ---- refused ----


@pytest.mark.parametrize(
    ("text", "processes", "model", "wanted"),
    [
        ("single+tp", 1, "DiT-T/8", ["cannot share weights", "take ddp"]),
        ("ddp+tp", 3, "DiT-T/8", ["3 processes are not groups of 2", "--processes 2"]),
        ("ddp+tp:ranks=4", 4, "DiT-S/8", ["6 heads", "ranks of 2 or 3 or 6"]),
        ("zero2+tp", 2, "DiT-T/8", ["zero2 shards weights in a way of its own", "take ddp"]),
        ("fsdp2+tp", 2, "DiT-T/8", ["shards it with nobody", "--processes 4, or ddp"]),
        ("hsdp+tp", 4, "DiT-T/8", ["shards it with nobody", "--processes 8"]),
        ("fsdp2:reshard=2+tp", 4, "DiT-T/8", ["of the 2 ranks that share"]),
        ("fsdp2:reshard=2+tp", 8, "DiT-T/8", ["beside tp", "take on or off"]),
        ("ddp+tp+compile", 2, "DiT-T/8", ["leave compile out"]),
        ("ddp+tp+checkpoint:keep=products", 2, "DiT-T/8", ["before ranks have summed it"]),
        ("ddp+tp:ranks=5", 5, "flux-dev", ["24 heads", "ranks of 2 or 3 or 4 or 6 or 8 or 12"]),
        ("ddp+tp", 2, "wan2.1-1.3b", ["blocks.0.attn1.norm_q normalizes", "take fsdp2"]),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_way_out(text, processes, model, wanted):
    change = {"model": model, "global_batch": 60, "processes": processes}
    if not model.startswith("DiT"):
        change |= {"data": "synthetic", "objective": "flow"}
    reason = str(resolve(dataclasses.replace(TINY, recipe=text, **change)).refusal)
    assert reason and [w for w in wanted if w not in reason] == []


@pytest.mark.parametrize(
    ("ranks", "inner", "said"),
    [
        (2, 257, "257 inner features of the MLP cannot be dealt to 2 ranks; leave tp out"),
        (4, 258, "258 inner features of the MLP cannot be dealt to 4 ranks; take ranks of 2"),
    ],
)
def test_an_uneven_mlp_is_refused_before_anything_starts(ranks, inner, said, monkeypatch):
    """No preset has one: a subject of one's own may."""
    size = resolve(TWO).subject.dimensions._replace(inner=inner)
    monkeypatch.setattr(type(resolve(TWO).subject), "dimensions", size)
    text = f"ddp+tp:ranks={ranks}"
    refused = str(resolve(dataclasses.replace(TWO, recipe=text, processes=ranks)).refusal)
    assert refused and refused.endswith(said)


def test_tokens_that_cannot_be_dealt_are_refused():
    odd = dataclasses.replace(TWO, recipe="ddp+tp:norms=tokens", data="synthetic:24")
    assert str(resolve(odd).refusal).endswith("9 tokens are not 2 equal stripes; take norms=whole")


BESIDE = {
    *("ddp", "fp32", "tf32", "bf16", "bf16_pure", "attend", "checkpoint"),
    *("adamw", "accumulate", "ema", "sp"),
}
"""What is not refused beside cut weights, on some machine: the rest has not been tried."""


def test_what_was_not_tried_beside_it_is_refused():
    taken = set()
    for name, texts in SETTINGS.items():
        for text in texts:
            words = ["ddp" if w == "single" else w for w in text.split("+") if w != "tp"]
            ranks = 4 if name == "sp" else 2
            spec = dataclasses.replace(TWO, recipe="+".join([*words, "tp"]), processes=ranks)
            if resolve(spec).refusal is None:
                taken.add(name)
    assert taken - {"single", "tp"} == BESIDE and set(CATALOG) > BESIDE


def test_what_is_no_number_of_ranks_is_refused():
    with pytest.raises(RecipeError, match="ranks is 1"):
        parse("ddp+tp:ranks=1")
    with pytest.raises(RecipeError, match="one of whole, tokens"):
        parse("ddp+tp:norms=cut")


# ---- parts ----


@pytest.mark.parametrize(
    ("shape", "axis", "pieces"),
    [
        ((12, 4), 0, (4, 4, 4)),
        ((12,), 0, (4, 4, 4)),
        ((4, 6), 0, ()),
        ((4, 6), 1, ()),
        ((4, 6), 1, (2, 4)),
        ((6, 4, 3), 0, (2, 4)),
    ],
)
def test_parts_are_the_whole_again_and_lie_where_they_say(shape, axis, pieces):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    size = torch.Size(shape)
    shares = [Share(shape=size, axis=axis, index=i, parts=2, pieces=pieces) for i in range(2)]
    parts = [share.part(whole) for share in shares]
    assert shares[0].joined(parts).equal(whole)
    for share, part in zip(shares, parts, strict=True):
        flat = part.reshape(-1)
        for start, offset, numel in share.runs():
            assert flat[start : start + numel].tolist() == [*range(offset, offset + numel)]
        assert sum(numel for *_, numel in share.runs()) == part.numel() == whole.numel() // 2


@pytest.mark.parametrize(
    ("axis", "pieces"), [(0, (4, 4, 4)), (0, (2, 10)), (0, ()), (1, ()), (1, (2, 6))]
)
def test_rows_of_a_part_lie_in_the_whole_where_their_boxes_say(axis, pieces):
    whole = torch.arange(12 * 8).view(12, 8)
    share = Share(shape=whole.shape, axis=axis, index=1, parts=2, pieces=pieces)
    part = share.part(whole)
    seen = 0
    for first in range(0, len(part), 4):
        rows = part[first : first + 4]
        for start, count, (top, left) in share.boxes(first, len(rows)):
            mine = rows.narrow(axis, start, count)
            assert whole[top : top + len(mine), left : left + mine.shape[1]].equal(mine)
            seen += mine.numel()
    assert seen == part.numel()

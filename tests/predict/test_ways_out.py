"""What a plan says when nothing fits: recipes that can be, predicted, and only those that fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import yaml

from harness import ROOT
from harness.planner import edits, verdict
from harness.planner.plan.answer import answer
from harness.planner.speed import rates as calibrated
from harness.planner.speed.roofline import seconds
from harness.planner.verdict import Fit
from harness.resolve import Resolved, resolve
from harness.system import cards
from tests.made.predictions import GIB, asked, prediction

pytestmark = pytest.mark.usefixtures("sure")

CARD = cards.of_size(24 * GIB)
LARGE = 40
"""GiB of which half are activations: a smaller micro batch alone would do."""

# What is nearest, on so many GPUs, with this global batch.
NEAREST = {
    "plain": ("ddp", 8, 256),
    "accumulation in use": ("ddp+accumulate:steps=4", 8, 256),
    "adapters and tf32": ("ddp+lora+tf32", 8, 256),
    "the optimizer's place taken": ("ddp+adafactor", 8, 256),
    "an optimizer that refuses DeepSpeed": ("single+offload_adamw", 1, 32),
    "offload in use": ("zero3_offload+bf16+checkpoint", 8, 256),
    "one process among eight": ("single", 1, 256),
    "a micro batch of 1": ("zero3+bf16", 8, 8),
}


def seek(
    recipe: str,
    need: Callable[[Resolved], float] = lambda row: LARGE,
    processes: int = 8,
    batch: int = 256,
) -> tuple[edits.Ways | None, list[Fit]]:
    """The ways out where ``recipe`` needs too much and what is asked for then ``need(row)``, and
    what was asked."""
    told: list[Fit] = []

    def ask(rows: list[Resolved], why: str) -> list[Fit]:
        found = [verdict.judge(row, prediction(need(row)), CARD) for row in rows]
        told.extend(found)
        return found

    fits = [failed(recipe, processes=processes, global_batch=batch)]
    return edits.seek(fits, max(processes, 8) if batch > 32 else processes, ask), told


def failed(recipe: str, **more: int) -> Fit:
    return verdict.judge(asked(recipe, **more), prediction(LARGE), CARD)


def names(told: list[Fit]) -> list[str]:
    return [one.label for one in told]


@pytest.mark.parametrize("case", NEAREST)
def test_whatever_is_asked_for_can_be_and_trains_the_same_batch(case):
    recipe, processes, batch = NEAREST[case]
    ways, told = seek(recipe, processes=processes, batch=batch)
    assert told and len(told) <= 20 and len(set(names(ways.tried))) == len(ways.tried)
    for one in told:
        row = resolve(one.resolved.spec)
        assert row.refusal is None
        whole = row.micro_batch * row.spec.processes * row.recipe.accumulation
        assert whole == row.spec.global_batch
    assert {one.resolved.spec.global_batch for one in ways.tried} <= {batch}
    assert recipe not in names(ways.tried)


def test_only_what_was_predicted_to_fit_is_named_the_fastest_first():
    rates = {"zero2": 3, "zero3": 2, "ddp+bf16": 1}
    ways, _ = seek("ddp", lambda row: 12 if str(row.recipe) in rates else LARGE)
    work = ways.tried[0].prediction.work[0]
    tried = []
    for one in ways.tried:
        slower = dataclasses.replace(work, count=rates.get(one.label, 9))
        tried.append(dataclasses.replace(one, seconds=seconds([slower], CARD, 8)))
    text = answer([failed("ddp")], dataclasses.replace(ways, tried=tried))
    assert text[2].startswith("Predicted to fit instead, of ")
    assert [line.split(",")[0].strip() for line in text[3:-1]] == ["ddp+bf16", "zero3", "zero2"]
    assert text[-1].startswith("  export it: ./run.sh export ddp+bf16 --model ")


def test_several_parts_are_changed_at_once_where_one_is_not_enough():
    def need(row: Resolved) -> float:
        return 10 if "host_optimizer" in row.launch.traits and row.micro_batch == 8 else LARGE

    ways, _ = seek("zero3+bf16", need)
    assert names(ways.able) == ["zero3_offload+bf16+checkpoint+accumulate:steps=4+ema:place=cpu"]
    assert not ways.wider


def test_more_gpus_are_the_last_resort_and_the_fewest_that_do_are_named():
    def need(row: Resolved) -> float:
        if row.spec.processes >= 32:
            return 20
        return 30 if "split_parameters" in row.launch.traits else LARGE

    ways, _ = seek("ddp", need)
    assert [one.resolved.spec.processes for one in ways.wider] == [16, 32, 64]
    text = "\n".join(answer([failed("ddp")], ways))
    assert f"None of {len(ways.tried)} changes tried fits: zero1, zero2, " in text
    assert "The least of these: zero3 needs 31.3 GiB" in text
    assert "On 32 GPUs, global batch 256: zero3, 21.3 GiB" in text and "On 64" not in text


# ---- words ----


@pytest.mark.parametrize("gib", [6, 16, 24, 32, 192])
def test_a_card_of_a_size_is_as_fast_as_the_slowest_of_them_that_has_bf16(gib):
    """A V100 or a T4 has no such unit: all products would be told at float32's speed."""
    card, near = cards.of_size(gib * GIB), cards.alike(gib * GIB)
    assert card.like == near[0].name and not card.timed
    assert all(card.flops("bfloat16") <= one.flops("bfloat16") for one in near)
    assert card.flops("bfloat16") > card.flops("float32")
    said = verdict.assumed(card)
    assert all(one.name in said for one in near) and f"times are those of {card.like};" in said


def test_cards_whose_times_nobody_measured_are_marked():
    rows = yaml.safe_load((ROOT / "docs/public-rows.yaml").read_text())
    measured = {name for row in rows for name in row.get("seconds", {})}
    measured |= {"H200-141GB"}  # docs/results/h200-141gb.jsonl.xz
    assert {c.name for c in cards.table().values() if c.timed} == measured & set(cards.table())
    new, known = cards.find("RTX-4070"), cards.find("H100-80GB")
    assert "times untried" in new.words and "untried" in calibrated.words(new)
    assert "untried" not in known.words + calibrated.words(known)

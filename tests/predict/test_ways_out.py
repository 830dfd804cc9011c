"""What a plan says when nothing fits: recipes that can be, predicted, and only those that fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import pytest
import yaml
from rich.console import Console

from harness import ROOT, cli
from harness.commands.progress import Predictions
from harness.planner import pool, records, verdict
from harness.planner.plan.answer import answer
from harness.planner.plan.candidates import Asked
from harness.planner.plan.tracing import Asking
from harness.planner.speed import rates as calibrated
from harness.planner.speed.roofline import seconds
from harness.planner.verdict import Fit
from harness.resolve import Resolved, resolve
from harness.system import cards
from strategies.base import Slot
from tests.made.predictions import GIB, asked, made_up, prediction

pytestmark = pytest.mark.usefixtures("sure")

CARD = cards.of_size(24 * GIB)
LARGE = 40
"""GiB of which half are activations."""

# What is nearest, on so many GPUs, with this global batch.
NEAREST = {
    "plain": ("ddp", 8, 256),
    "accumulation in use": ("ddp+accumulate:steps=4", 8, 256),
    "an adapter of another kind": ("ddp+lokr+tf32", 8, 256),
    "a rank": ("zero3+bf16+lora:rank=4", 8, 256),
    "the optimizer's place taken": ("ddp+adafactor", 8, 256),
    "an optimizer that refuses DeepSpeed": ("single+offload_adamw", 1, 32),
    "offload in use": ("zero3_offload+bf16+checkpoint", 8, 256),
    "one process among eight": ("single", 1, 256),
    "a micro batch of 1": ("zero3+bf16", 8, 8),
}


@pytest.fixture
def instead(monkeypatch):
    """What is tried where ``recipe`` needs too much and another row ``need(row)``."""

    def tried(
        recipe: str,
        need: Callable[[Resolved], float] = lambda row: LARGE,
        processes: int = 8,
        batch: int = 256,
    ) -> list[Fit]:
        made_up(monkeypatch, need)
        monkeypatch.setattr(records, "find", lambda *_: None)
        monkeypatch.setattr(pool, "cached", lambda *_: None)
        fit = failed(recipe, processes=processes, global_batch=batch)
        ranks = max(processes, 8) if batch > 32 else processes
        given = Asked(resolved=[fit.resolved], refused=[], gpu=CARD, processes=ranks)
        return Asking(given, 1, Predictions(Console(quiet=True))).instead([fit])

    return tried


def failed(recipe: str, **more: int) -> Fit:
    return verdict.judge(asked(recipe, **more), prediction(LARGE), CARD)


def names(told: Iterable[Fit]) -> list[str]:
    return [one.label for one in told]


@pytest.mark.parametrize("case", NEAREST)
def test_whatever_is_asked_for_can_be_and_trains_the_same_batch_and_weights(case, instead):
    recipe, processes, batch = NEAREST[case]
    tried = instead(recipe, processes=processes, batch=batch)
    given = asked(recipe, processes=processes, global_batch=batch)
    own = given.recipe.in_slot(Slot.ADAPT)
    assert tried and len(set(names(tried))) == len(tried)
    for one in tried:
        row = resolve(one.resolved.spec)
        assert row.refusal is None
        whole = row.micro_batch * row.spec.processes * row.recipe.accumulation
        assert whole == row.spec.global_batch == batch
        part = row.recipe.in_slot(Slot.ADAPT)
        assert bool(part) == bool(own) and (own is None or part.rank == own.rank)
    assert recipe not in names(tried)


def test_only_what_was_predicted_to_fit_is_named_the_fastest_first(instead):
    tried = instead("ddp", lambda row: 12 if "shards" in row.launch.traits else LARGE)
    able = [one for one in tried if one.fits]
    work, tried = able[0].prediction.work[0], [one for one in tried if not one.fits]
    for place, one in enumerate(able):  # the last is the fastest
        slow = seconds([dataclasses.replace(work, count=1 + len(able) - place)], CARD, 8)
        tried.append(dataclasses.replace(one, seconds=slow))
    text = answer([failed("ddp")], tried)
    assert text[2].startswith("Predicted to fit instead, of ")
    named = [line.split(",")[0].strip() for line in text[3:-1]]
    assert named == names(reversed(able))[: len(named)] != []
    assert text[-1].startswith(f"  export it: ./run.sh export {named[0]} --model ")


def test_smaller_micro_batches_are_tried_where_no_recipe_fits(instead):
    def need(row: Resolved) -> float:
        return 10 if row.micro_batch == 8 else LARGE

    tried = instead("zero3+bf16", need)
    (found,) = [one for one in tried if one.fits]
    assert found.resolved.recipe.accumulation == 4 and found.resolved.spec.global_batch == 256
    text = "\n".join(answer([failed("ddp")], instead("ddp")))
    assert "others tried fits; the least: " in text and "--gpus 2 4 8" in text


def test_a_recorded_model_says_what_fits_instead_without_a_trace(monkeypatch, capsys):
    monkeypatch.undo()

    def traced(rows: list[Resolved], *_: object) -> Iterator[None]:
        assert not rows, "a recipe would be traced"
        return iter(())

    monkeypatch.setattr(pool, "_each", traced)
    words = ["plan", "--model", "flux-dev", "--gpu", "RTX-4090", "--check", "--recipes"]
    assert cli.main([*words, "single+bf16_pure+lora:rank=16"]) == 1
    assert "; fits: single+bf16_pure+" in capsys.readouterr().out


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

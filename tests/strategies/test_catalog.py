"""Every strategy round-trips as text, and shows its evidence in a real training."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import subprocess
import sys

import pytest
import torch
from conftest import TINY, launchable, observe_here, part_named, showing

from harness import ROOT
from strategies import CATALOG, conflicts, parse, words
from strategies.base import Conflict, NotInForce, Sizes
from strategies.engines.zero.config import buffer_sizes
from strategies.evidence.rules import effects, settings
from strategies.recipe import ABSENT, RecipeError
from strategies.sharding import sharding_kinds
from strategies.step.ema import Ema
from tests.made import mission
from tests.made.publics import miniature
from tests.made.recipes import OTHERS, SETTINGS, TRAINED_HERE

SHARDING = set(sharding_kinds())

TEXTS = [text for texts in SETTINGS.values() for text in texts]


# -- as text ----------------------------------------------------------------------------------


def test_the_table_covers_the_catalog():
    assert set(OTHERS) <= set(CATALOG) == set(SETTINGS)
    assert all(part_named(text, name) for name, texts in SETTINGS.items() for text in texts)


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips_without_its_defaults(text):
    recipe = parse(text)
    assert parse(str(recipe)) == recipe
    for part in recipe.strategies:
        assert parse(f"single+{part}" if part.name not in SHARDING else str(part)).in_slot(
            part.slot
        ) == (part)
        for field in dataclasses.fields(part):
            shown = f"{field.name}=" in str(part)
            assert shown == (getattr(part, field.name) != field.default)
    assert "fp32" not in str(parse("ddp+fp32")) and str(parse("ddp+adamw+ema")) == "ddp"


def test_the_order_of_names_does_not_matter():
    words = ["zero3_offload", "bf16", "checkpoint:every=2", "accumulate:steps=4", "ema:place=cpu"]
    wanted = parse("+".join(words))
    assert str(wanted) == "+".join(words)
    shuffled = random.Random(0).sample(list(itertools.permutations(words)), 12)
    assert {parse("+".join(order)) for order in shuffled} == {wanted}
    slots = [part.slot for part in wanted.strategies]
    assert slots == sorted(slots) and len(set(slots)) == len(slots)


def test_parity_is_exact_only_if_every_part_is():
    assert parse("zero3_offload+checkpoint+accumulate").parity == "exact"
    assert parse("zero3+bf16").parity == "by design"
    assert parse("ddp+tf32").parity == "by design"


@pytest.mark.parametrize(
    ("text", "kind", "wanted"),
    [
        ("ddp+zero3", Conflict, ["ddp", "zero3", "SHARD"]),
        ("bf16", Conflict, ["no sharding", "ddp+bf16"]),
        ("zero4", RecipeError, ["'zero4'", "did you mean 'zero"]),
        ("", RecipeError, ["./run.sh list shows"]),
        ("FSDP+bf16", RecipeError, ["take fsdp2"]),
        ("ddp+grad_accum=4", RecipeError, ["write accumulate:steps=4"]),
        ("ddp+", RecipeError, ["unknown strategy ''"]),
        ("ddp+checkpoint:evry=2", RecipeError, ["'evry'", "did you mean 'every'"]),
        ("ddp+checkpoint:every", RecipeError, ["needs a value", "checkpoint:every=1"]),
        ("ddp+checkpoint:every=0", RecipeError, ["every is 0", "sqrt"]),
        ("ddp+checkpoint:spread=on", RecipeError, ["spread=on", "add share=0.5"]),
        ("ddp+fp8:emulate=maybe", RecipeError, ["on or off", "'maybe'"]),
        ("single+lora:blocks=x", RecipeError, ["lora: blocks is 'x'", "0-9/12"]),
        ("single+loha:targets=to_q/", RecipeError, ["targets is 'to_q/'", "to_q/to_v"]),
        ("single+lora:reach=model,blocks=0", RecipeError, ["leave blocks=0 out"]),
        ("single+distill:weight=0", RecipeError, ["the teacher is not used"]),
        ("ddp+sp:ranks=1", RecipeError, ["ranks is 1"]),
        ("pp:micro=1", RecipeError, ["micro is 1; a whole number from 2; one micro batch"]),
        ("ddp+fp16:scale=1000", RecipeError, ["scale is 1000", "power of two"]),
    ],
)
def test_what_is_no_recipe_is_refused_by_name(text, kind, wanted):
    with pytest.raises(kind) as caught:
        parse(text)
    assert [w for w in wanted if w not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("ddp+bfloat16", "ddp+bf16"),
        ("deepspeed-stage-2+bf16", "zero2+bf16"),
        ("single+lora:r=16", "single+lora:rank=16"),
    ],
)
def test_a_strategy_has_other_spellings(typed, text):
    assert str(parse(typed)) == text


def test_other_spellings_and_hints_name_strategies_that_exist():
    assert set(words.SPELLED.values()) <= {*CATALOG, *ABSENT}
    assert words.SPELLED.keys() & (words.MEANT.keys() | CATALOG.keys()) == set()
    assert [*CATALOG, *ABSENT] == [name for name in (*CATALOG, *ABSENT) if name not in words.MEANT]
    for name, parameter in words.PLAIN.items():
        assert parameter in {field.name for field in dataclasses.fields(CATALOG[name])}
    told = re.findall(r"(?:take|write) ([a-z0-9_]+)", " ".join(words.MEANT.values()))
    assert [name for name in told if name not in CATALOG] == []


@pytest.mark.parametrize("name", conflicts.table())
def test_an_entry_of_the_conflicts_can_be_met(name):
    """Its parameter and its traits are known, and it says the way out."""
    known = {*conflicts.TRAITS, *conflicts.OF_LAUNCH}
    fields = {field.name: field for field in dataclasses.fields(CATALOG[name])}
    for entry in conflicts.table()[name]:
        assert not entry.parameter or entry.parameter in fields
        if entry.value is not None:
            assert CATALOG[name](**{entry.parameter: entry.value})
        words = entry.any | entry.every | entry.unless
        assert words and words <= known
        filled = entry.why.format(sharding="", trait="", **dict.fromkeys(fields, ""))
        assert "; " in filled and "\n" not in filled


# -- imports ----------------------------------------------------------------------------------


def test_launching_reporting_and_parsing_need_no_torch():
    code = (
        "import sys, strategies, harness.launch.launch, harness.report.anatomy, harness.data.feed,"
        "harness.subjects.dit.presets, harness.report;"
        "strategies.parse('zero3_offload+bf16+checkpoint');"
        "heavy = ('torch', 'accelerate', 'deepspeed', 'rich');"
        "print([name for name in heavy if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


# -- evidence ---------------------------------------------------------------------------------


FIRST = {*mission.TRAINED.values(), *(texts[0] for texts in SETTINGS.values())}
"""The mission's recipes, and one of each strategy: they run by default."""
EVERY = dict.fromkeys([*mission.TRAINED.values(), *TRAINED_HERE])


@pytest.mark.parametrize("text", launchable(EVERY, FIRST - {"single+compile"}))
def test_evidence_is_shown_by_a_real_training(text, train_here):
    fields = [more for word, more in mission.FITTING.items() if f"+{word}" in text]
    spec = dataclasses.replace(showing(text), **(fields[0] if fields else {}))
    run = train_here(spec, 2)
    assert run.optimizer_steps == 2 and len(run.log.losses) == 2
    observe_here(run, text)
    for part in parse(text).strategies:
        facts = part.evidence(run)
        assert effects(facts), f"{part} shows an effect"
        assert set(settings(facts)) <= set(facts), "a label of something that is there"


def test_a_step_that_was_skipped_is_noticed(train_here):
    run = train_here(TINY, 2)
    run.optimizer_steps += 1
    for kind in (CATALOG["adamw"], Ema):
        with pytest.raises(NotInForce, match="2"):
            kind().evidence(run)


def test_buckets_are_even_whatever_the_model():
    """DeepSpeed's stages 1 and 2 assert it: without this a DiT of an odd sixteenth cannot start."""
    sizes = buffer_sizes(Sizes(33_000_031, block=1000, tensor=999, bias=10))
    assert sizes["allgather_bucket_size"] % 2 == sizes["reduce_bucket_size"] % 2 == 0


@pytest.mark.parametrize("layers", ["all", "blocks"])
def test_qlora_leaves_in_full_the_layers_that_a_model_s_class_keeps(layers, train_here):
    """Wan's class keeps its time embedder; its model reads the type of that embedder's weights."""
    run = train_here(miniature("wan2.1-1.3b", f"single+bf16_pure+qlora:layers={layers}"), 1)
    named = run.module.named_modules()
    full = {n for n, m in named if type(m) is torch.nn.Linear and "lora_" not in n}
    kept = {f"condition_embedder.time_embedder.linear_{i}" for i in (1, 2)}
    assert full == kept if layers == "all" else full > kept | {"proj_out"}
    assert run.log.losses[0].isfinite()

"""The catalog as a table: every strategy round-trips as text and shows its evidence in a real
training (``test_stubs`` takes the effect away).

Strategies that need several processes or DeepSpeed show and lose theirs in ``test_runs``.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SUBJECT, TINY, launchable, observe_here, part_named, showing, traced_here

from harness import ROOT
from strategies import CATALOG, conflicts, parse, words
from strategies.activations.block_parts import block_runs, prefixes, segments
from strategies.activations.checkpoint import Checkpoint
from strategies.base import TRAITS, Conflict, NotInForce, Parity, Sizes, Slot
from strategies.engines.zero.config import buffer_sizes
from strategies.evidence.rules import SETTINGS as LABEL
from strategies.evidence.rules import effects, settings
from strategies.optimizers import bf16_adamw
from strategies.recipe import ABSENT, RecipeError
from strategies.sharding import Sharding, sharding_kinds
from strategies.step.ema import Ema
from tests.made import mission
from tests.made.publics import miniature
from tests.made.recipes import OTHERS, SETTINGS, TRAINED_HERE

FILES = ROOT / "strategies"
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
    assert parse("zero3_offload+checkpoint+accumulate").parity is Parity.EXACT
    assert parse("zero3+bf16").parity is Parity.BY_DESIGN
    assert parse("ddp+tf32").parity is Parity.BY_DESIGN


@pytest.mark.parametrize("name", CATALOG)
def test_every_strategy_says_what_it_is(name):
    kind = CATALOG[name]
    assert kind.name == name and isinstance(kind.slot, Slot) and isinstance(kind.parity, Parity)
    assert len(kind.source) > 20, "whom it comes from"
    first = kind.__doc__.strip().splitlines()[0]
    assert 20 < len(first) <= 100 and not first.startswith(kind.__name__ + "(")
    assert kind.evidence is not Sharding.__mro__[1].evidence


@pytest.mark.parametrize(
    ("text", "kind", "wanted"),
    [
        ("ddp+zero3", Conflict, ["ddp", "zero3", "SHARD"]),
        ("ddp+bf16+fp32", Conflict, ["bf16", "fp32", "PRECISION"]),
        ("ddp+checkpoint+checkpoint:every=2", Conflict, ["RECOMPUTE"]),
        ("bf16", Conflict, ["no sharding", "ddp+bf16"]),
        ("zero4", RecipeError, ["'zero4'", "did you mean 'zero"]),
        ("ddp+chekpoint", RecipeError, ["'chekpoint'", "did you mean 'checkpoint'"]),
        ("", RecipeError, ["./run.sh list shows"]),
        ("FSDP+bf16", RecipeError, ["take fsdp2"]),
        ("deepspeed", RecipeError, ["zero1, zero2 and zero3", "zero3_offload"]),
        ("ddp+flash-attn", RecipeError, ["attend:kernel=flash"]),
        ("ddp+sdpa", RecipeError, ["attend:kernel=flash"]),
        ("ddp+cp", RecipeError, ["take sp"]),
        ("ddp+amp", RecipeError, ["take bf16 or fp16"]),
        ("ddp+grad_accum=4", RecipeError, ["write accumulate:steps=4"]),
        ("ddp+gradient_accumulation_steps=4", RecipeError, ["write accumulate:steps=4"]),
        ("ddp+blocks_to_swap=20", RecipeError, ["write block_swap:blocks=20"]),
        ("ddp+accumulate:4", RecipeError, ["write accumulate:steps=4"]),
        ("ddp+vae_slicing", RecipeError, ["./run.sh list shows what there is"]),
        ("ddp+", RecipeError, ["unknown strategy ''"]),
        ("ddp+checkpoint:evry=2", RecipeError, ["'evry'", "did you mean 'every'"]),
        ("ddp+bf16:fast=on", RecipeError, ["'fast'", "it has none"]),
        ("ddp+checkpoint:every", RecipeError, ["needs a value", "checkpoint:every=1"]),
        ("ddp+checkpoint:every=0", RecipeError, ["every is 0", "sqrt"]),
        ("ddp+checkpoint:every=half", RecipeError, ["'half'", "sqrt"]),
        ("ddp+checkpoint:share=0", RecipeError, ["share is 0", "above 0"]),
        ("ddp+checkpoint:spread=on", RecipeError, ["spread=on", "add share=0.5"]),
        ("ddp+checkpoint:share=0.5,keep=nothing", RecipeError, ["keep=nothing", "leave share=0.5"]),
        ("ddp+cross_entropy:kind=half", RecipeError, ["'half'", "full, chunked"]),
        ("ddp+cross_entropy:kind=full,chunks=4", RecipeError, ["leave chunks=4 out"]),
        ("ddp+cast:to=int4", RecipeError, ["'int4'", "int8, fp8"]),
        ("ddp+cast:to=fp8,dynamic=on", RecipeError, ["in int8", "leave to=fp8 out"]),
        ("ddp+block_swap:blocks=2", RecipeError, ["blocks is 2", "from 3"]),
        ("ddp+checkpoint:part=norm", RecipeError, ["'norm'", "block, ffn, attention"]),
        ("ddp+checkpoint:part=ffn,every=2", RecipeError, ["part=ffn", "leave all else out"]),
        ("ddp+checkpoint:keep=some", RecipeError, ["'some'", "segments, nothing"]),
        ("ddp+checkpoint:keep=nothing,every=2", RecipeError, ["leave every=2 out"]),
        ("ddp+offload_activations:what=some", RecipeError, ["'some'", "all, checkpoints"]),
        ("ddp+muon:momentum=1", RecipeError, ["momentum is 1", "below 1"]),
        ("ddp+compile:scope=layer", RecipeError, ["'layer'", "block, model"]),
        ("ddp+compile:backend=gcc", RecipeError, ["'gcc'", "inductor, aot_eager"]),
        ("ddp+compile:budget=2", RecipeError, ["budget is 2", "from 0 to 1"]),
        ("ddp+compile:budget=0.5,scope=model", RecipeError, ["leave scope=model out"]),
        ("ddp+attend:kernel=quick", RecipeError, ["'quick'", "naive, math"]),
        ("ddp+accumulate:steps=1", RecipeError, ["steps is 1", "from 2"]),
        ("ddp+accumulate:steps=1.5", RecipeError, ["'1.5'", "whole number"]),
        ("ddp+adamw:impl=fsed", RecipeError, ["'fsed'", "fused, foreach, plain"]),
        ("ddp+ema:place=disk", RecipeError, ["'disk'", "device, cpu, none"]),
        ("ddp+fp8:emulate=maybe", RecipeError, ["on or off", "'maybe'"]),
        ("ddp+fp8:scaling=block", RecipeError, ["'block'", "tensorwise, rowwise"]),
        ("fsdp2+fp8:gather=fp8,scaling=rowwise", RecipeError, ["one scale a weight"]),
        ("ddp+fp16:scale=1000", RecipeError, ["scale is 1000", "power of two"]),
        ("ddp+adamw_bf16:write=twice", RecipeError, ["'twice'", "stochastic, kahan"]),
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
        ("ZeRO-3+gradient_checkpointing", "zero3+checkpoint"),
        ("deepspeed-stage-2+bf16", "zero2+bf16"),
        ("fully_shard+activation_checkpointing", "fsdp2+checkpoint"),
        ("single+8bit-adam", "single+adam8bit"),
        ("single+AdamW8bit", "single+adam8bit"),
        ("single+paged_adamw_8bit", "single+paged_adam8bit"),
        ("single+torch.compile", "single+compile"),
        ("single+lora:r=16", "single+lora:rank=16"),
        ("single+lora:network_dim=16", "single+lora:rank=16"),
        ("ddp+gradient_accumulation:steps=4", "ddp+accumulate:steps=4"),
        ("single+activation-offloading", "single+offload_activations"),
    ],
)
def test_a_strategy_has_other_spellings(typed, text):
    assert str(parse(typed)) == text


def test_other_spellings_and_hints_name_strategies_that_exist():
    assert [name for name in words.SPELLED.values() if name not in CATALOG] == []
    assert words.SPELLED.keys() & (words.MEANT.keys() | CATALOG.keys()) == set()
    assert [*CATALOG, *ABSENT] == [name for name in (*CATALOG, *ABSENT) if name not in words.MEANT]
    for name, parameter in words.PLAIN.items():
        assert parameter in {field.name for field in dataclasses.fields(CATALOG[name])}
    told = re.findall(r"(?:take|write) ([a-z0-9_]+)", " ".join(words.MEANT.values()))
    assert [name for name in told if name not in CATALOG] == []


def test_two_parts_may_not_set_the_same_argument(monkeypatch):
    monkeypatch.setattr(Checkpoint, "accelerator_kwargs", lambda *_: {"mixed_precision": "fp16"})
    recipe = parse("single+bf16+checkpoint")
    with pytest.raises(Conflict, match=r"checkpoint sets Accelerator\(mixed_precision"):
        recipe.accelerator_kwargs(recipe.sharding.launch("cpu", 1, SUBJECT))


@pytest.mark.parametrize("name", conflicts.table())
def test_an_entry_of_the_conflicts_can_be_met(name):
    """Its parameter and its traits are known, and it says the way out."""
    known = {*TRAITS, *conflicts.OF_LAUNCH}
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


TORCHLESS = ("harness.launch.launch", "harness.report.anatomy", "harness.data.feed",
             "harness.subjects.dit.presets", "harness.report", "strategies")  # fmt: skip


def test_launching_reporting_and_parsing_need_no_torch():
    code = (
        f"import sys, {', '.join(TORCHLESS)}; strategies.parse('zero3_offload+bf16+checkpoint');"
        "heavy = ('torch', 'accelerate', 'deepspeed', 'rich');"
        "print([name for name in heavy if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def test_strategies_import_nothing_of_the_harness():
    found = {path: imported(path) for path in FILES.rglob("*.py")}
    assert "torch" in found[FILES / "precision/mixed.py"], "the scan sees imports inside functions"
    assert {name for name, names in found.items() if "harness" in names} == set()


# -- evidence ---------------------------------------------------------------------------------


# test_mission trains the others.
MORE = [text for text in TRAINED_HERE if text not in mission.TRAINED.values()]


@pytest.mark.parametrize("text", launchable(MORE, {*MORE} - {"single+compile"}))
def test_evidence_is_shown_by_a_real_training(text, train_here):
    run, log = train_here(showing(text), 2)
    assert run.trained.optimizer_steps == 2 and len(log.losses) == 2
    observe_here(run, log, text)
    for part in parse(text).strategies:
        facts = part.evidence(run.trained)
        assert effects(facts), f"{part} shows an effect"
        assert set(settings(facts)) <= set(facts), "a label of something that is there"


def evidence_of(name: str, text: str, train_here, **fields) -> dict:
    run, _ = train_here(dataclasses.replace(TINY, recipe=text, **fields), 2)
    return part_named(text, name).evidence(run.trained)


def test_evidence_says_what_was_read_back(train_here):
    bf16 = evidence_of("bf16", "single+bf16", train_here)
    assert (bf16["compute_dtype"], bf16["parameters"], bf16["master"]) == (
        "bfloat16", "float32", "float32",
    )  # fmt: skip
    accumulate = evidence_of("accumulate", "single+accumulate:steps=4", train_here)
    assert accumulate.pop(LABEL) == ["steps"], "accelerate's own number is a setting"
    assert accumulate == {"steps": 4, "micro_steps_per_optimizer_step": 4.0}
    sqrt = evidence_of("checkpoint", "single+checkpoint:every=sqrt", train_here)
    assert sqrt["parts"] == 2 and sqrt["block_forwards"] == 2.0
    plain = evidence_of("adamw", "single+adamw:impl=plain", train_here)
    assert plain == {"class": "AdamW", "steps": 2, "moment_bytes_per_element": 8.0}, (
        "no step was watched, so no kernel is named"
    )
    assert evidence_of("ema", "single+ema:place=cpu", train_here)["updates"] == 2
    assert evidence_of("ema", "single", train_here, ema=0.5)["updates"] == 2


@pytest.mark.parametrize("impl", ["fused", "foreach", "plain"])
def test_the_kernel_that_ran_is_read_off_a_traced_step(impl, train_here):
    spec = dataclasses.replace(TINY, recipe=f"single+adamw:impl={impl}")
    ran = traced_here(train_here, spec, 1)[0].trained.ops
    kind = CATALOG["adamw"]
    assert kind(impl=impl).kernel(ran) == {"kernel": impl}
    for other in {"fused", "foreach", "plain"} - {impl}:
        with pytest.raises(NotInForce, match=f"the step ran the {impl} kernel, expected {other}"):
            kind(impl=other).kernel(ran)


def test_rounding_by_chance_is_right_on_average():
    exact = torch.full((100_000,), 1 + 2**-10)
    written = bf16_adamw.rounded_by_chance(exact, torch.Generator().manual_seed(1)).float()
    assert set(written.tolist()) == {1.0, 1 + 2**-7}
    assert abs(float(written.mean()) - (1 + 2**-10)) < 1e-4
    assert torch.equal(
        bf16_adamw.rounded_by_chance(torch.tensor([-0.5])).float(), torch.tensor([-0.5])
    )


def test_a_compensated_sum_loses_nothing_in_the_long_run():
    weight, carried = torch.ones(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
    plain, update = weight.clone(), torch.full((1,), 1e-4)
    for _ in range(1000):
        weight, carried = bf16_adamw.compensated(weight, carried, update)
        plain += update.to(plain.dtype)
    assert float(plain) == 1.0 and abs(float(weight) - 1.1) < 2**-7


def test_single_is_lost_in_another_launch(train_here):
    run, _ = train_here(TINY, 1)
    single, ddp = CATALOG["single"], CATALOG["ddp"]
    assert single().evidence(run.trained)
    run.trained.launch = single.launch("cpu", 2, SUBJECT)
    refusal = str(parse("single").refusal(run.trained.launch))
    assert "one process, not 2" in refusal and "--processes 1" in refusal
    with pytest.raises(NotInForce, match="1 processes"):
        single().evidence(run.trained)
    for name in SHARDING - {"single"}:
        run.trained.launch = CATALOG[name].launch("cpu", 1, SUBJECT)
        with pytest.raises(NotInForce, match="accelerate runs NO"):
            CATALOG[name]().evidence(run.trained)
    run.trained.launch = single.launch("cpu", 1, SUBJECT)
    run.trained.model = torch.nn.Sequential(run.trained.module)
    with pytest.raises(NotInForce, match="Sequential"):
        single().evidence(run.trained)
    assert ddp.launch("cpu", 2, SUBJECT).engine.file.kind == "MULTI_CPU"


def test_a_step_that_was_skipped_is_noticed(train_here):
    run, _ = train_here(TINY, 2)
    run.trained.optimizer_steps += 1
    for kind in (CATALOG["adamw"], Ema):
        with pytest.raises(NotInForce, match="2"):
            kind().evidence(run.trained)


def test_blocks_recomputed_once_too_few_are_noticed(train_here):
    run, _ = train_here(dataclasses.replace(TINY, recipe="single+checkpoint:every=2"), 2)
    run.trained.module.run_blocks.blocks_run -= 1
    with pytest.raises(NotInForce, match="in each micro-batch, expected 8"):
        Checkpoint(every=2).evidence(run.trained)


@pytest.mark.parametrize("blocks", [1, 4, 7])
def test_work_of_recomputing_against_its_closed_form(blocks):
    assert block_runs(segments(1), blocks) == block_runs(segments(3), blocks) == 2 * blocks
    assert block_runs(prefixes, blocks) == blocks + blocks * (blocks + 1) // 2


@pytest.mark.parametrize("total", [33_000_000, 33_000_016, 33_000_031])
def test_buckets_are_even_whatever_the_model(total):
    """DeepSpeed's stages 1 and 2 assert it: without this a DiT of an odd sixteenth cannot start."""
    sizes = buffer_sizes(Sizes(total, block=1000, tensor=999, bias=10))
    assert sizes["allgather_bucket_size"] % 2 == sizes["reduce_bucket_size"] % 2 == 0
    small = buffer_sizes(Sizes(1000, block=100, tensor=99, bias=10))
    assert small["allgather_bucket_size"] == 100


@pytest.mark.parametrize("layers", ["all", "blocks"])
def test_qlora_leaves_in_full_the_layers_that_a_model_s_class_keeps(layers, train_here):
    """Wan's class keeps its time embedder; its model reads the type of that embedder's weights."""
    run, log = train_here(miniature("wan2.1-1.3b", f"single+bf16_pure+qlora:layers={layers}"), 1)
    named = run.trained.module.named_modules()
    full = {n for n, m in named if type(m) is torch.nn.Linear and "lora_" not in n}
    kept = {f"condition_embedder.time_embedder.linear_{i}" for i in (1, 2)}
    assert full == kept if layers == "all" else full > kept | {"proj_out"}
    assert log.losses[0].isfinite()

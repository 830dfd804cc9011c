"""The catalog as a table: every strategy round-trips as text, shows its evidence in a real
training, and loses it when its effect is taken away.

Strategies that need several processes or DeepSpeed show and lose theirs in ``test_runs``.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY
from test_compress import LOST as LOST_ON_THE_WIRE

from harness.anatomy import trace_step
from harness.loop import optimizer_step
from harness.resolve import project_root
from strategies import CATALOG, adamw_bf16, attend, frozen, parse, states
from strategies.accumulate import Accumulate
from strategies.adafactor import Adafactor
from strategies.adamw_bf16 import AdamWBf16
from strategies.adapters import Dora, Lora, Qlora, inject
from strategies.attend import Attend
from strategies.average import Average, Ema
from strategies.backward import Backward
from strategies.base import Conflict, NotInForce, Parity, Slot
from strategies.bfloat import Bf16Master, Bf16Pure
from strategies.compiled import Compile
from strategies.controlnet import ControlNet
from strategies.float8 import Fp8
from strategies.fp16 import Fp16
from strategies.host import Host
from strategies.in_backward import InBackward, OptimizerInBackward
from strategies.low_bit import Adam4bit, Adam8bit, PagedAdam8bit
from strategies.muon import Muon
from strategies.offload import OffloadActivations
from strategies.offload_adamw import OffloadAdamW
from strategies.optimizers import AdamW
from strategies.partial import DiffFit, Head
from strategies.parts import Recompute, block_runs, halves, prefixes, segments
from strategies.precision import Bf16, Fp32, Tf32
from strategies.prune import Prune
from strategies.prune_structured import PruneStructured, prune_heads
from strategies.quantised import torchao_adam
from strategies.recipe import RecipeError
from strategies.recompute import Checkpoint
from strategies.sgd import Sgd
from strategies.sharding import Sharding, sharding_kinds, zero_sizes
from strategies.sparse24 import Sparse24
from strategies.sparse_embedding import SparseEmbedding

FILES = project_root() / "strategies"
SHARDING = set(sharding_kinds())

SETTINGS: dict[str, list[str]] = {
    "single": ["single"],
    "ddp": ["ddp"],
    "zero1": ["zero1"],
    "zero2": ["zero2"],
    "zero3": ["zero3"],
    "zero2_offload": ["zero2_offload"],
    "zero3_offload": ["zero3_offload"],
    "zero3_nvme": ["zero3_nvme"],
    "fp32": ["single+fp32"],
    "tf32": ["ddp+tf32"],
    "bf16": ["single+bf16"],
    "lora": ["single+lora", "single+lora:rank=4"],
    "dora": ["single+dora"],
    "qlora": ["single+qlora"],
    "head": ["single+head"],
    "difffit": ["single+difffit"],
    "controlnet": ["single+controlnet", "single+controlnet:share=1.0"],
    "prune": ["single+prune", "single+prune:fraction=0.9"],
    "prune_structured": ["single+prune_structured", "single+prune_structured:fraction=0.25"],
    "sparse24": ["ddp+bf16+sparse24"],
    "bf16_master": ["zero2+bf16_master"],
    "bf16_pure": ["single+bf16_pure", "zero2+bf16_pure"],
    "fp16": ["ddp+fp16", "zero2+fp16:scale=1024"],
    "fp8": ["ddp+fp8", "single+fp8:emulate=on"],
    "checkpoint": [
        "single+checkpoint",
        "single+checkpoint:every=2",
        "single+checkpoint:every=sqrt",
        "single+checkpoint:keep=nested",
        "single+checkpoint:keep=nothing",
        "single+checkpoint:every=2,keep=products",
    ],
    "offload_activations": [
        "single+offload_activations",
        "single+checkpoint:every=2+offload_activations:what=checkpoints",
    ],
    "compile": [
        "single+compile",
        "single+compile:scope=model,backend=aot_eager",
        "single+compile:backend=aot_eager,budget=0.5",
    ],
    "attend": [
        *(f"single+attend:kernel={kernel}" for kernel in ("naive", "math", "flash")),
        *(f"ddp+attend:kernel={kernel}" for kernel in ("efficient", "cudnn", "flex")),
    ],
    "adamw": ["single+adamw", "single+adamw:impl=foreach", "single+adamw:impl=plain"],
    "adam8bit": ["single+adam8bit", "single+adam8bit:lib=torchao"],
    "adam4bit": ["single+adam4bit"],
    "paged_adam8bit": ["ddp+paged_adam8bit"],
    "adafactor": ["single+adafactor"],
    "muon": ["single+muon", "single+muon:momentum=0.9"],
    "sgd": ["single+sgd", "single+sgd:momentum=0.0"],
    "offload_adamw": ["ddp+offload_adamw"],
    "onebit_adam": ["ddp+onebit_adam", "ddp+onebit_adam:freeze=4"],
    "compress": ["ddp+compress", "ddp+compress:kind=powersgd,rank=2", "ddp+compress:kind=fp16"],
    "topk": ["ddp+topk", "ddp+topk:keep=0.1"],
    "sparse_embedding": ["single+sgd:momentum=0.0+sparse_embedding"],
    "optimizer_in_backward": ["single+optimizer_in_backward"],
    "backward": ["single+backward", "single+backward:call=autograd_grad"],
    "adamw_bf16": ["single+bf16_pure+adamw_bf16", "single+bf16_pure+adamw_bf16:write=kahan"],
    "accumulate": ["single+accumulate", "single+accumulate:steps=4"],
    "ema": ["single+ema", "single+ema:place=cpu", "single+ema:place=none"],
}
"""Recipe texts for every strategy; those on ``single`` are trained in this process."""

TEXTS = [text for texts in SETTINGS.values() for text in texts]
HERE = [text for text in TEXTS if text.startswith("single")]


def part_named(text: str, name: str):
    return next(part for part in parse(text).strategies if part.name == name)


# -- as text ----------------------------------------------------------------------------------


def test_the_table_covers_the_catalog():
    assert set(SETTINGS) == set(CATALOG)
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


def test_strategy_files_stay_small():
    large = {"sharding", "zero", "average", "base", "recipe"}
    lengths = {p.stem: len(p.read_text().splitlines()) for p in FILES.glob("*.py")}
    assert {"recompute", "accumulate", "precision"} <= set(lengths)
    assert {n: length for n, length in lengths.items() if n not in large and length > 130} == {}


@pytest.mark.parametrize(
    ("text", "kind", "wanted"),
    [
        ("ddp+zero3", Conflict, ["ddp", "zero3", "SHARD"]),
        ("ddp+bf16+fp32", Conflict, ["bf16", "fp32", "PRECISION"]),
        ("ddp+checkpoint+checkpoint:every=2", Conflict, ["RECOMPUTE"]),
        ("bf16", Conflict, ["no sharding", "ddp+bf16"]),
        ("zero4", RecipeError, ["'zero4'", "did you mean 'zero"]),
        ("ddp+chekpoint", RecipeError, ["'chekpoint'", "did you mean 'checkpoint'"]),
        ("", RecipeError, ["known: accumulate"]),
        ("ddp+", RecipeError, ["unknown strategy ''"]),
        ("ddp+checkpoint:evry=2", RecipeError, ["'evry'", "did you mean 'every'"]),
        ("ddp+bf16:fast=on", RecipeError, ["'fast'", "it has none"]),
        ("ddp+checkpoint:every", RecipeError, ["needs a value", "checkpoint:every=1"]),
        ("ddp+checkpoint:every=0", RecipeError, ["every is 0", "sqrt"]),
        ("ddp+checkpoint:every=half", RecipeError, ["'half'", "sqrt"]),
        ("ddp+checkpoint:keep=some", RecipeError, ["'some'", "nested, nothing"]),
        ("ddp+checkpoint:keep=nested,every=2", RecipeError, ["leave every=2 out"]),
        ("ddp+offload_activations:what=some", RecipeError, ["'some'", "all, checkpoints"]),
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
    ("text", "device", "processes", "wanted"),
    [
        ("single", "cpu", 2, ["one process, not 2", "--processes 1"]),
        ("ddp+bf16_master", "cpu", 2, ["only DeepSpeed", "use zero1, or bf16"]),
        ("ddp+adamw_bf16", "cpu", 2, ["no master", "add bf16_pure"]),
        ("zero2_offload+bf16_pure", "cpu", 2, ["CPU Adam", "or bf16_master"]),
        ("zero2_offload+adamw:impl=plain", "cpu", 2, ["CPU Adam", "leave impl=plain out"]),
        ("ddp+offload_activations:what=checkpoints", "cpu", 2, ["no checkpoints", "what=all"]),
        ("ddp+offload_activations+checkpoint", "cpu", 2, ["take what=checkpoints"]),
        ("ddp+checkpoint:keep=nested+compile", "cpu", 2, ["keep=nested", "budget=0.5"]),
        ("ddp+checkpoint+compile:budget=0.5", "cpu", 2, ["leave budget=0.5"]),
        ("ddp+checkpoint+compile:scope=model", "cpu", 2, ["leave scope=model out"]),
        ("ddp+attend:kernel=flash", "cuda", 2, ["16 bits", "add bf16", "kernel=efficient"]),
        ("zero3_offload+adamw:impl=foreach", "cuda", 2, ["leave impl=foreach out"]),
    ],
)
def test_a_part_refuses_a_launch_with_the_way_out(text, device, processes, wanted):
    recipe = parse(text)
    reason = recipe.refusal(recipe.launch(device, processes))
    assert [w for w in wanted if w not in reason] == []
    for name in ("ddp", "zero2_offload"):
        usual = parse(name)
        assert usual.refusal(usual.launch("cpu", 2)) is None


def test_two_parts_may_not_set_the_same_argument(monkeypatch):
    monkeypatch.setattr(Checkpoint, "accelerator_kwargs", lambda *_: {"mixed_precision": "fp16"})
    recipe = parse("single+bf16+checkpoint")
    with pytest.raises(Conflict, match=r"checkpoint sets Accelerator\(mixed_precision"):
        recipe.accelerator_kwargs(recipe.sharding.launch("cpu", 1))


# -- imports ----------------------------------------------------------------------------------


def test_importing_and_parsing_needs_no_torch():
    code = (
        "import sys, strategies; strategies.parse('zero3_offload+bf16+checkpoint');"
        "print([m for m in ('torch', 'accelerate', 'deepspeed') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=project_root(), capture_output=True, text=True, check=True
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
    found = {path.stem: imported(path) for path in FILES.glob("*.py")}
    assert "torch" in found["precision"], "the scan sees imports inside functions"
    assert {name for name, names in found.items() if "harness" in names} == set()


# -- evidence ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HERE)
def test_evidence_is_shown_by_a_real_training(text, train_here):
    run, log = train_here(dataclasses.replace(TINY, recipe=text), 2)
    assert run.trained.optimizer_steps == 2 and len(log.losses) == 2
    for part in parse(text).strategies:
        assert part.evidence(run.trained), f"{part} shows facts"


def evidence_of(name: str, text: str, train_here, **fields) -> dict:
    run, _ = train_here(dataclasses.replace(TINY, recipe=text, **fields), 2)
    return part_named(text, name).evidence(run.trained)


def test_evidence_says_what_was_read_back(train_here):
    bf16 = evidence_of("bf16", "single+bf16", train_here)
    assert (bf16["compute_dtype"], bf16["parameters"], bf16["master"]) == (
        "bfloat16", "float32", "float32",
    )  # fmt: skip
    assert evidence_of("accumulate", "single+accumulate:steps=4", train_here) == {
        "steps": 4,
        "micro_steps_per_optimizer_step": 4.0,
    }
    sqrt = evidence_of("checkpoint", "single+checkpoint:every=sqrt", train_here)
    assert sqrt["parts"] == 2 and sqrt["block_forwards"] == 2.0
    plain = evidence_of("adamw", "single+adamw:impl=plain", train_here)
    assert plain == {"class": "AdamW", "impl": "plain", "steps": 2}
    assert evidence_of("ema", "single+ema:place=cpu", train_here)["updates"] == 2
    assert evidence_of("ema", "single", train_here, ema=0.5)["updates"] == 2


def recompute_as(split, policy=None):
    def edit(self, module):
        module.run_blocks = Recompute(module.run_blocks, split, policy)

    return edit


class Pretending(Recompute):
    """Counts its parts and recomputes nothing."""

    def part(self, blocks, x_BTD, c_BD, level):
        return self._inside(blocks, x_BTD, c_BD, level)


class Boasting(Pretending):
    """Counts blocks twice and recomputes nothing."""

    def _inside(self, blocks, x_BTD, c_BD, level):
        self.blocks_run += len(blocks)
        return super()._inside(blocks, x_BTD, c_BD, level)


def pretend(kind):
    def edit(self, module):
        module.run_blocks = kind(module.run_blocks, segments(1))

    return edit


def attend_by(function):
    def edit(self, module):
        for block in module.blocks:
            block.attn.attend = function

    return edit


class Idle(Host):
    """Says that it moves tensors and keeps them where they are."""

    def run(self, blocks, x_BTD, c_BD):
        return self.inner(blocks, x_BTD, c_BD)


class Parked(Host):
    """Moves a tensor out in the last block alone."""

    def run(self, blocks, x_BTD, c_BD):
        return super().run(blocks[-1:], self.inner(blocks[:-1], x_BTD, c_BD), c_BD)


def host_as(kind):
    def edit(self, module):
        module.run_blocks = kind(module.run_blocks)

    return edit


COMPILE = Compile.edit_model


def skipping_one(self, module):
    COMPILE(self, module)
    module.blocks[0]._compiled_call_impl = None


def without_budget(self, module):
    COMPILE(Compile(backend=self.backend), module)


def one_in_four(self, module):
    module.blocks[0].attn.attend = attend.naive


def adamw(**other):
    def make(self, params, settings, launch):
        usual = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
        usual |= {"weight_decay": settings.weight_decay, "fused": True}
        return torch.optim.AdamW(params, **{**usual, **other})

    return make


def sgd(self, params, settings, launch):
    return torch.optim.SGD(params, lr=settings.learning_rate)


def float_adam(self, params, settings, launch):
    return AdamW().make_optimizer(params, settings, launch)


def half_the_bits(self, params, settings, launch):
    return torchao_adam("AdamW8bit", params, settings, launch.device)


def no_momentum(self, params, settings, launch):
    return states.count_steps(torch.optim.SGD(params, lr=settings.learning_rate))


def unpaged(self, params, settings, launch):
    return Adam8bit().make_optimizer(params, settings, launch)


def first_matrices(self, module):
    for block in module.blocks:
        block.attn.qkv.weight.hidden_matrix = True


def plain_sgd(self, params, settings, launch):
    return torch.optim.SGD(params, lr=settings.learning_rate, momentum=0.9)


class Hoarding(InBackward):
    """Steps in backward and keeps every gradient."""

    def _follow(self, gradient):
        super()._follow(gradient)
        self.kept = [*getattr(self, "kept", []), gradient]


def hoard(self, trained):
    return Hoarding(trained)


def adapters_left_frozen(self, module):
    inject(module, self.rank)
    frozen.train_only(module, {"final_layer.linear.weight"})


def full_precision(self, module):
    inject(module, self.rank)


def twice_the_rank(self, module):
    inject(module, 2 * self.rank)


def no_magnitudes(self, module):
    inject(module, self.rank)


def everything_trains(self, module):
    inject(module, self.rank)
    module.requires_grad_(True)


def biases_only(self, module):
    names = {n for n, _ in module.named_parameters() if n.endswith(".bias")}
    frozen.train_only(module, names)


CONTROL, PRUNE, MASKS = ControlNet.edit_model, Prune.edit_model, Prune.attach


def cut_off(self, module):
    CONTROL(self, module)
    for block in module.blocks[:2]:
        block.zero.requires_grad_(False)


def half(self, module):
    CONTROL(ControlNet(), module)


def half_pruned(self, module):
    PRUNE(Prune(), module)


def idle_masks(self, trained):
    masks = MASKS(self, trained)
    for parameter, _ in masks.pruned:
        parameter._backward_hooks.clear()
    masks.after_step = lambda: None
    return masks


def heads_alone(self, module):
    for block in module.blocks:
        block.had = (block.attn.num_heads, block.mlp.fc1.out_features, 10**9)
        prune_heads(block.attn, 2)


class Lazy(Average):
    """Never averages."""

    def after_step(self):
        pass


class Counting(Average):
    """Counts its updates and makes none."""

    def after_step(self):
        self.updates += 1


class WitnessOnly(Average):
    """Averages the witness and leaves the shards alone."""

    def after_step(self):
        kept = [shard.clone() for shard in self.shards]
        super().after_step()
        for shard, before in zip(self.shards, kept, strict=True):
            shard.copy_(before)


class Copying(Average):
    """Copies the weights instead of averaging them."""

    def after_step(self):
        super().after_step()
        for shard, (_, master) in zip(self.shards, self._masters(), strict=True):
            shard.copy_(master.detach())


def attach(kind=Average, decay=None, place="device"):
    def attached(self, trained):
        return kind(trained, trained.settings.ema_decay if decay is None else decay, place)

    return attached


def nothing(*_, **__):
    return None


def nearest(exact, generator=None):
    return exact.to(torch.bfloat16)


def dropping(weight, carried, update):
    return (weight.float() + update).to(weight.dtype), torch.zeros_like(carried)


AS_BF16 = {"mixed_precision": "bf16"}
LOST = {
    "fp32 runs as bf16": ("single", Fp32, "accelerator_kwargs", lambda *_: AS_BF16),
    "bf16 without autocast": ("single+bf16", Bf16, "accelerator_kwargs", lambda *_: {}),
    "tf32 runs as bf16": ("single+tf32", Tf32, "accelerator_kwargs", lambda *_: AS_BF16),
    "bf16_pure keeps float32": ("single+bf16_pure", Bf16Pure, "edit_model", nothing),
    "fp8 runs as bf16": ("single+fp8:emulate=on", Fp8, "edit_model", nothing),
    "fp16 without autocast": ("single+fp16", Fp16, "accelerator_kwargs", lambda *_: {}),
    "no master beside bfloat16 weights": (
        "single+bf16_master", Bf16Master, "accelerator_kwargs", lambda *_: AS_BF16,
    ),
    "adamw rounds to nearest": (
        "single+bf16_pure+adamw_bf16", AdamWBf16, "make_optimizer", adamw(),
    ),
    "checkpoint edits nothing": ("single+checkpoint", Checkpoint, "edit_model", nothing),
    "every=2 edits nothing": ("single+checkpoint:every=2", Checkpoint, "edit_model", nothing),
    "sqrt edits nothing": ("single+checkpoint:every=sqrt", Checkpoint, "edit_model", nothing),
    "one segment, not one a block": (
        "single+checkpoint", Checkpoint, "edit_model", recompute_as(segments(4)),
    ),
    "one segment, not sqrt": (
        "single+checkpoint:every=sqrt", Checkpoint, "edit_model", recompute_as(segments(4)),
    ),
    "parts counted, not recomputed": (
        "single+checkpoint", Checkpoint, "edit_model", pretend(Pretending),
    ),
    "blocks counted twice, not recomputed": (
        "single+checkpoint", Checkpoint, "edit_model", pretend(Boasting),
    ),
    "two segments, not nested": (
        "single+checkpoint:keep=nested", Checkpoint, "edit_model", recompute_as(segments(2)),
    ),
    "one segment, not prefixes": (
        "single+checkpoint:keep=nothing", Checkpoint, "edit_model", recompute_as(segments(4)),
    ),
    "products recomputed as well": (
        "single+checkpoint:keep=products", Checkpoint, "edit_model", recompute_as(segments(1)),
    ),
    "activations stay": ("single+offload_activations", OffloadActivations, "edit_model", nothing),
    "activations stay, by another runner": (
        "single+offload_activations", OffloadActivations, "edit_model", host_as(Idle),
    ),
    "one block's activations of four": (
        "single+offload_activations", OffloadActivations, "edit_model", host_as(Parked),
    ),
    "checkpoints stay": (
        "single+checkpoint+offload_activations:what=checkpoints",
        OffloadActivations, "edit_model", nothing,
    ),
    "nothing compiled": ("single+compile:backend=aot_eager", Compile, "edit_model", nothing),
    "three blocks compiled of four": (
        "single+compile:backend=aot_eager", Compile, "edit_model", skipping_one,
    ),
    "the model not compiled": (
        "single+compile:scope=model,backend=aot_eager", Compile, "edit_model", nothing,
    ),
    "compiled without the budget": (
        "single+compile:backend=aot_eager,budget=0.5", Compile, "edit_model", without_budget,
    ),
    "torch chooses, not naive": ("single+attend", Attend, "edit_model", nothing),
    "math, not naive": ("single+attend", Attend, "edit_model", attend_by(attend.forced("MATH"))),
    "naive in one block of four": ("single+attend", Attend, "edit_model", one_in_four),
    "naive, not math": (
        "single+attend:kernel=math", Attend, "edit_model", attend_by(attend.naive),
    ),
    "naive, not flash": (
        "single+attend:kernel=flash", Attend, "edit_model", attend_by(attend.naive),
    ),
    "sgd": ("single", AdamW, "make_optimizer", sgd),
    "foreach for fused": ("single", AdamW, "make_optimizer", adamw(fused=False, foreach=True)),
    "fused for foreach": ("single+adamw:impl=foreach", AdamW, "make_optimizer", adamw()),
    "fused for plain": ("single+adamw:impl=plain", AdamW, "make_optimizer", adamw()),
    "other betas": ("single", AdamW, "make_optimizer", adamw(betas=(0.9, 0.99))),
    "other decay of weights": ("single", AdamW, "make_optimizer", adamw(weight_decay=0.1)),
    "other learning rate": ("single", AdamW, "make_optimizer", adamw(lr=2e-4)),
    "amsgrad": ("single", AdamW, "make_optimizer", adamw(amsgrad=True)),
    "float moments for 8 bits": ("single+adam8bit", Adam8bit, "make_optimizer", float_adam),
    "another library": ("single+adam8bit", Adam8bit, "make_optimizer", half_the_bits),
    "8 bits for 4": ("single+adam4bit", Adam4bit, "make_optimizer", half_the_bits),
    "moments that are not paged": (
        "single+paged_adam8bit", PagedAdam8bit, "make_optimizer", unpaged,
    ),
    "adam for adafactor": ("single+adafactor", Adafactor, "make_optimizer", float_adam),
    "adam for muon": ("single+muon", Muon, "make_optimizer", float_adam),
    "adam for every matrix": ("single+muon", Muon, "edit_model", first_matrices),
    "adam for sgd": ("single+sgd", Sgd, "make_optimizer", float_adam),
    "sgd without its momentum": ("single+sgd", Sgd, "make_optimizer", no_momentum),
    "sgd that counts no steps": ("single+sgd", Sgd, "make_optimizer", plain_sgd),
    "steps after backward": (
        "single+optimizer_in_backward", OptimizerInBackward, "attach", nothing,
    ),
    "gradients kept": ("single+optimizer_in_backward", OptimizerInBackward, "attach", hoard),
    "no adapters": ("single+lora", Lora, "edit_model", nothing),
    "adapters of another rank": ("single+lora", Lora, "edit_model", twice_the_rank),
    "frozen adapters": ("single+lora", Lora, "edit_model", adapters_left_frozen),
    "weights that train beside them": ("single+lora", Lora, "edit_model", everything_trains),
    "no checksums": ("single+lora", Lora, "attach", nothing),
    "no magnitudes": ("single+dora", Dora, "edit_model", no_magnitudes),
    "weights in full": ("single+qlora", Qlora, "edit_model", full_precision),
    "the whole model trains": ("single+head", Head, "edit_model", nothing),
    "biases train too": ("single+head", Head, "edit_model", biases_only),
    "no scales": ("single+difffit", DiffFit, "edit_model", biases_only),
    "the whole model, no branch": ("single+controlnet", ControlNet, "edit_model", nothing),
    "a branch that is cut off": ("single+controlnet", ControlNet, "edit_model", cut_off),
    "no branch on the second half": ("single+controlnet:share=1.0", ControlNet, "edit_model", half),
    "no masks": ("single+prune", Prune, "attach", nothing),
    "masks that mask nothing": ("single+prune", Prune, "attach", idle_masks),
    "other masks": ("single+prune:fraction=0.9", Prune, "edit_model", half_pruned),
    "nothing removed": ("single+prune_structured", PruneStructured, "edit_model", nothing),
    "heads and no channels": (
        "single+prune_structured", PruneStructured, "edit_model", heads_alone,
    ),
    "dense layers": ("single+bf16+sparse24", Sparse24, "edit_model", nothing),
    "an optimizer on the device": (
        "single+offload_adamw", OffloadAdamW, "make_optimizer", float_adam,
    ),
    "dense gradients": (
        "single+sgd:momentum=0.0+sparse_embedding", SparseEmbedding, "edit_model", nothing,
    ),
    "backward as usual": ("single+backward", Backward, "configure", nothing),
    "no accumulation": ("single+accumulate", Accumulate, "accelerator_kwargs", lambda *_: {}),
    "half the accumulation": (
        "single+accumulate:steps=4",
        Accumulate,
        "accelerator_kwargs",
        lambda *_: {"gradient_accumulation_steps": 2},
    ),
    "no average": ("single", Ema, "attach", nothing),
    "no average in host memory": ("single+ema:place=cpu", Ema, "attach", nothing),
    "an average nobody asked for": ("single+ema:place=none", Ema, "attach", attach()),
    "an average that never steps": ("single", Ema, "attach", attach(Lazy)),
    "an average that only counts": ("single", Ema, "attach", attach(Counting)),
    "a witness without an average": ("single", Ema, "attach", attach(WitnessOnly)),
    "a copy, not an average": ("single", Ema, "attach", attach(Copying)),
    "another decay": ("single", Ema, "attach", attach(decay=0.5)),
}  # fmt: skip
"""What happened instead -> (recipe, strategy, the stage that is stubbed, the stub)."""


@pytest.mark.parametrize("case", LOST)
def test_evidence_is_lost_when_the_effect_is_stubbed(case, train_here, monkeypatch):
    text, kind, stage, stub = LOST[case]
    monkeypatch.setattr(kind, stage, stub)
    run, _ = train_here(dataclasses.replace(TINY, recipe=text), 2)
    with pytest.raises(NotInForce):
        part_named(text, kind.name).evidence(run.trained)


def test_every_strategy_without_a_launch_file_is_stubbed():
    here = {kind.name for _, kind, _, _ in LOST.values()}
    on_the_wire = {strategy.name for strategy, _ in LOST_ON_THE_WIRE.values()}
    assert here | on_the_wire == set(CATALOG) - SHARDING


@pytest.mark.parametrize("impl", ["fused", "foreach", "plain"])
def test_the_kernel_that_ran_is_read_off_a_traced_step(impl, train_here):
    run, log = train_here(dataclasses.replace(TINY, recipe=f"single+adamw:impl={impl}"), 1)
    trace_step(run.trained, "cpu", lambda: optimizer_step(run, 1, log))
    for other in ("fused", "foreach", "plain"):
        part = AdamW(impl=other)
        if other == impl:
            part._kernel(run.trained.ops)
        else:
            with pytest.raises(NotInForce, match=f"the step ran the {impl} kernel, not {other}"):
                part._kernel(run.trained.ops)


def test_tf32_left_on_is_noticed(train_here, monkeypatch):
    monkeypatch.setattr(Fp32, "edit_model", nothing)
    run, _ = train_here(TINY, 1)
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        with pytest.raises(NotInForce, match="TF32 is on"):
            Fp32().evidence(run.trained)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(
    ("write", "function", "stub"),
    [("stochastic", "rounded_by_chance", nearest), ("kahan", "compensated", dropping)],
)
def test_bfloat16_written_plainly_is_noticed(write, function, stub, train_here, monkeypatch):
    monkeypatch.setattr(adamw_bf16, function, stub)
    text = f"single+bf16_pure+adamw_bf16:write={write}"
    run, _ = train_here(dataclasses.replace(TINY, recipe=text), 2)
    with pytest.raises(NotInForce, match="plain rounding"):
        part_named(text, "adamw_bf16").evidence(run.trained)


def test_rounding_by_chance_is_right_on_average():
    exact = torch.full((100_000,), 1 + 2**-10)
    written = adamw_bf16.rounded_by_chance(exact, torch.Generator().manual_seed(1)).float()
    assert set(written.tolist()) == {1.0, 1 + 2**-7}
    assert abs(float(written.mean()) - (1 + 2**-10)) < 1e-4
    assert torch.equal(
        adamw_bf16.rounded_by_chance(torch.tensor([-0.5])).float(), torch.tensor([-0.5])
    )


def test_a_compensated_sum_loses_nothing_in_the_long_run():
    weight, carried = torch.ones(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
    plain, update = weight.clone(), torch.full((1,), 1e-4)
    for _ in range(1000):
        weight, carried = adamw_bf16.compensated(weight, carried, update)
        plain += update.to(plain.dtype)
    assert float(plain) == 1.0 and abs(float(weight) - 1.1) < 2**-7


def test_single_is_lost_in_another_launch(train_here):
    run, _ = train_here(TINY, 1)
    single, ddp = CATALOG["single"], CATALOG["ddp"]
    assert single().evidence(run.trained)
    run.trained.launch = single.launch("cpu", 2)
    with pytest.raises(NotInForce, match="1 processes"):
        single().evidence(run.trained)
    for name in SHARDING - {"single"}:
        run.trained.launch = CATALOG[name].launch("cpu", 1)
        with pytest.raises(NotInForce, match="accelerate runs NO"):
            CATALOG[name]().evidence(run.trained)
    run.trained.launch = single.launch("cpu", 1)
    run.trained.model = torch.nn.Sequential(run.trained.module)
    with pytest.raises(NotInForce, match="Sequential"):
        single().evidence(run.trained)
    assert ddp.launch("cpu", 2).engine == "MULTI_CPU"


def test_a_step_that_was_skipped_is_noticed(train_here):
    run, _ = train_here(TINY, 2)
    run.trained.optimizer_steps += 1
    for kind in (AdamW, Ema):
        with pytest.raises(NotInForce, match="2"):
            kind().evidence(run.trained)


def test_blocks_recomputed_once_too_few_are_noticed(train_here):
    run, _ = train_here(dataclasses.replace(TINY, recipe="single+checkpoint:every=2"), 2)
    run.trained.module.run_blocks.blocks_run -= 1
    with pytest.raises(NotInForce, match="recomputing takes 8"):
        Checkpoint(every=2).evidence(run.trained)


@pytest.mark.parametrize("blocks", [1, 4, 7])
def test_work_of_recomputing_against_its_closed_form(blocks):
    assert block_runs(segments(1), blocks) == block_runs(segments(3), blocks) == 2 * blocks
    assert block_runs(prefixes, blocks) == blocks + blocks * (blocks + 1) // 2
    if blocks & (blocks - 1) == 0:  # half of each level but the last is run again with it
        levels = blocks.bit_length() - 1
        assert block_runs(halves, blocks) == 2 * blocks + blocks * max(levels - 1, 0) // 2


@pytest.mark.parametrize("total", [33_000_000, 33_000_016, 33_000_031])
def test_buckets_are_even_whatever_the_model(total):
    """DeepSpeed's stages 1 and 2 assert it: without this a DiT of an odd sixteenth cannot start."""
    sizes = zero_sizes(total, block=1000, tensor=999, bias=10)
    assert sizes["allgather_bucket_size"] % 2 == sizes["reduce_bucket_size"] % 2 == 0
    small = zero_sizes(1000, block=100, tensor=99, bias=10)
    assert small["allgather_bucket_size"] == 100

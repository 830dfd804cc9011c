"""First weights: the same in every row, drawn by name, and never more of them than will live."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from conftest import STRIP, TINY, Case, OnDemand, launchable, launched_together, weights_digest
from torch import nn

from harness.memory.record import phase_peaks
from harness.memory.tracer import Tracer
from harness.resolve import resolve
from harness.subjects.dit.subject import Dit
from harness.worker import setup
from harness.worker.setup import combined, edited_model
from strategies import initial
from strategies.sparsity.prune import Prune
from strategies.strategy import Strategy

SPEC = dataclasses.replace(TINY, model="DiT-T/4:depth=8")
RESOLVED = resolve(SPEC)
BUILT = initial.build(RESOLVED.subject, SPEC.seed, SPEC.init)
WHOLE = sum(p.nbytes for p in BUILT.parameters())
LINEARS = [name for name, part in BUILT.named_modules() if isinstance(part, nn.Linear)]
LARGEST = max(p.nbytes for p in BUILT.parameters())
SLACK = 3 * LARGEST
"""A draw, its cast and its packing; beside them nothing but what stays."""


def drawn(draw: initial.Draw, names: list[str]) -> dict[str, torch.Tensor]:
    like = dict(BUILT.named_parameters())
    return {name: draw(name, like[name]) for name in names}


def test_a_first_weight_depends_on_seed_and_name_and_not_on_order():
    assert WHOLE > 6 * LARGEST, "else nothing here could tell one parameter from the model"
    names = [n for n, _ in BUILT.named_parameters()]
    forward, other = (drawn(RESOLVED.subject.draws(seed, "awake"), names) for seed in (0, 1))
    backward = drawn(RESOLVED.subject.draws(0, "awake"), names[::-1])
    for name in names[::9]:
        alone = drawn(RESOLVED.subject.draws(0, "awake"), [name])[name]
        assert forward[name].equal(backward[name]) and forward[name].equal(alone)
    random = [n for n, p in BUILT.named_parameters() if p.requires_grad and p.any() and p.ndim > 1]
    assert not any(forward[n].equal(other[n]) for n in random)
    alike = [forward[f"blocks.{i}.attn.qkv.weight"] for i in (0, 1)]
    assert not alike[0].equal(alike[1]), "another name, another draw"


def test_the_digest_is_of_the_weights_that_were_drawn():
    module, weights, _ = edited_model(RESOLVED)
    initial.fill(module, weights, "cpu")
    digest = combined(weights.digests)
    assert digest == weights_digest(module) == weights_digest(BUILT)
    with torch.no_grad():
        module.blocks[3].mlp.fc1.bias[0] += 1e-7
    assert weights_digest(module) != digest


# -- one process ------------------------------------------------------------------------------


@pytest.fixture
def loaded(train_here, monkeypatch):
    """``loaded(recipe) -> (Run, bytes of tensors at the peak of load)``, before any step."""

    def go(recipe: str, spec=SPEC):
        tracer, prepare = Tracer({"cpu": "device"}), setup.prepare

        def watched(resolved, feed, accelerator, scratch, enter):
            with tracer:
                return prepare(resolved, feed, accelerator, scratch, tracer.enter)

        monkeypatch.setattr(setup, "prepare", watched)
        run = train_here(dataclasses.replace(spec, recipe=recipe), 0)
        monkeypatch.setattr(setup, "prepare", prepare)
        return run, phase_peaks(tracer.record, "device")["load"]

    return go


def plain(module: nn.Module) -> dict[str, torch.Tensor]:
    """The subject's own parameters by its names, those in 4 bits unpacked."""
    import bitsandbytes

    def value(p):
        packed = getattr(p, "quant_state", None)
        return p if packed is None else bitsandbytes.functional.dequantize_4bit(p.data, packed)

    named = {n.replace(".base_layer", ""): p for n, p in module.named_parameters()}
    return {n: value(p).detach() for n, p in named.items() if "lora_" not in n}


@pytest.mark.parametrize(
    ("recipe", "share"),
    [
        ("single", 1),
        ("single+bf16_pure+lora", 0.5),
        ("single+qlora", 0.15),
    ],
)
def test_loading_holds_what_will_live_and_one_parameter_more(recipe, share, loaded):
    run, peak = loaded(recipe)
    adapters = sum(p.nbytes for n, p in run.module.named_parameters() if "lora_" in n)
    assert share * WHOLE * 0.9 < peak < share * WHOLE + adapters + SLACK
    assert run.digest == weights_digest(BUILT) and run.notes == []
    for name, p in plain(run.module).items():
        wanted = dict(BUILT.named_parameters())[name]
        if "qlora" in recipe and name.removesuffix(".weight") in LINEARS:
            # The widest step of nf4 is 0.304 of a block's largest: half of it, and its rounding.
            assert (p.float() - wanted).abs().max() < 0.16 * wanted.abs().max()
            assert (p.float() - wanted).abs().mean() < 0.1 * wanted.abs().mean()
        else:
            assert p.equal(wanted.to(p.dtype)), name


def test_a_model_built_whole_shows_in_the_peak_and_in_a_note(loaded, monkeypatch):
    monkeypatch.setattr(Dit, "draws", lambda *given: None)
    run, peak = loaded("single+bf16_pure+qlora")
    assert peak > WHOLE and "built whole in float32" in run.notes[0]


def test_a_subject_of_one_s_own_is_built_whole_and_says_so(loaded):
    run, _ = loaded("single+bf16_pure", STRIP)
    assert "Strip is built whole" in run.notes[0] and "Subject.draws" in run.notes[0]
    built = initial.build(resolve(STRIP).subject, STRIP.seed, STRIP.init)
    assert run.digest == weights_digest(built)
    for p, wanted in zip(run.module.parameters(), built.parameters(), strict=True):
        assert p.equal(wanted.bfloat16())


@pytest.mark.parametrize("recipe", ["single+prune", "single+dora", "single+controlnet"])
def test_what_must_see_weights_sees_them(recipe, loaded):
    run, _ = loaded(recipe)
    assert run.digest == weights_digest(BUILT)
    assert not initial.waits(run.module)


def test_what_uses_weights_that_are_not_there_is_told(loaded, monkeypatch):
    zeroed = lambda self, module, subject: nn.init.zeros_(module.pos_embed)  # noqa: E731
    monkeypatch.setattr(Prune, "edit_model", zeroed)
    loaded("single+prune")  # it sees weights, and may
    monkeypatch.setattr(Prune, "reads_weights", Strategy.reads_weights)
    with pytest.raises(ValueError, match=r"pos_embed was written to .* reads_weights = True"):
        loaded("single+prune")


# -- two processes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peaks(tmp_path_factory) -> Mapping[str, list[int]]:
    """Bytes at the peak of "load" by recipe and rank; "zero3 whole" draws nothing by name."""
    folder: Path = tmp_path_factory.mktemp("loaded")

    def load(name: str) -> list[int]:
        spec = dataclasses.replace(SPEC, recipe=name.removesuffix(" whole"), processes=2)
        env = {"WHOLE": "1"} if "whole" in name else {}
        case = Case(spec, module="tests.children.loaded", env=env)
        row = launched_together({name: case}, folder)[name]
        files = [folder / name / f"loaded-{rank}.json" for rank in range(2)]
        assert all(file.exists() for file in files), row.log_tail
        return [json.loads(file.read_text()) for file in files]

    return OnDemand(load)


@pytest.mark.parametrize("recipe", launchable(["zero3+bf16", "zero3+lora"], ["zero3+bf16"]))
def test_under_zero3_no_rank_ever_holds_the_whole_model(recipe, peaks):
    share = 0.25 if "bf16" in recipe else 0.5
    for peak in peaks[recipe]:
        assert 0.9 * share * WHOLE < peak < share * WHOLE + SLACK < WHOLE
    assert min(*peaks["zero3 whole"], *peaks["ddp"]) >= WHOLE


def test_under_fsdp2_a_block_is_cut_before_the_next_has_its_weights(peaks):
    block = sum(p.nbytes for p in BUILT.blocks[0].parameters())
    for peak in peaks["fsdp2+bf16"]:  # masters are float32, whatever is gathered
        assert 0.5 * WHOLE < peak < 0.5 * WHOLE + 1.5 * block + SLACK < WHOLE

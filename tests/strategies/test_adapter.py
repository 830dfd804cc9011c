"""Samples drawn with adapters that were trained: from training's file, beside and merged."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from conftest import DRAWN, TINY
from safetensors.torch import load_file, save_file

from harness.planner import pool
from harness.resolve import resolve
from harness.worker.training import Training
from strategies.base import BadInput

RANK = 4
KEY = "blocks.0.attn.qkv.lora_A.default.weight"


@pytest.fixture
def trained(train_here, tmp_path) -> Path:
    """What ``train --recipe single+lora`` leaves, its second matrices moved from zero."""
    spec = dataclasses.replace(TINY, objective="flow", recipe=f"single+lora:rank={RANK}", ema=0.5)
    run, _ = train_here(dataclasses.replace(spec, learning_rate=1e-2), 4)
    file = tmp_path / "adapters.safetensors"
    Training(folder=None, averaged=file).finish(run, resolve(spec))
    return file


def drawing(file: Path | str, more: str = ""):
    recipe = f"single+adapter:file={file}{more}"
    return dataclasses.replace(DRAWN, recipe=recipe, sampler_steps=8)


def evidence(drawn) -> dict:
    parts = drawn.resolved.recipe.strategies
    return next(part for part in parts if part.name == "adapter").evidence(drawn.trained)


def test_what_training_left_is_drawn_with_beside_and_merged(trained, draw_here):
    state = load_file(trained)
    beside = draw_here(drawing(trained))
    held = dict(beside.trained.module.named_parameters())
    assert all(held[name].equal(value) for name, value in state.items())
    told, samples = evidence(beside), beside.drawn.clone()
    assert (told["rank"], told["beside_elements"]) == (RANK, sum(v.numel() for v in state.values()))
    merged = draw_here(drawing(trained, ",how=merged"))
    assert evidence(merged)["beside_elements"] == 0
    plain = draw_here(dataclasses.replace(drawing(trained), recipe="single"))
    base = plain.trained.module.blocks[0].attn.qkv.weight
    product = state[KEY.replace("lora_A", "lora_B")] @ state[KEY]
    torch.testing.assert_close(merged.trained.module.blocks[0].attn.qkv.weight, base + product)
    apart = (plain.drawn - samples).norm()
    assert (merged.drawn - samples).norm() < 1e-3 * apart and apart > 1e-4 * samples.norm()
    count = sum(p.numel() for p in merged.trained.module.parameters())
    assert count == sum(p.numel() for p in plain.trained.module.parameters())


def refusal(file: Path | str, more: str = "") -> str:
    return str(resolve(drawing(file, more)).refusal or "")


def test_files_of_something_else_are_refused_by_name(trained, tmp_path, draw_here):
    state, other = load_file(trained), tmp_path / "other.safetensors"
    assert refusal(trained) == ""
    assert "no file none.safetensors" in refusal("none.safetensors")
    assert f"rank is 8, and {trained} has {RANK}" in refusal(trained, ",rank=8")
    other.write_text("nothing")
    assert "no file of safetensors" in refusal(other)
    save_file(state | {"blocks.0.attn.qkv.lora_magnitude_vector": torch.ones(3)}, str(other))
    assert "no matrix of LoRA's" in refusal(other) and "merge it yourself" in refusal(other)
    save_file({name: value for name, value in state.items() if name != KEY}, str(other))
    assert "no matrix of LoRA's" in refusal(other)
    save_file(state | {KEY: torch.zeros(RANK + 1, 128)}, str(other))
    assert "ranks [4, 5]" in refusal(other)
    save_file({}, str(other))
    assert "holds nothing" in refusal(other)
    save_file(state | {KEY: torch.zeros(RANK, 64)}, str(other))
    with pytest.raises(BadInput, match=r"of 64 by \d+, and .* has \(128, "):
        draw_here(drawing(other))


def test_adapters_of_other_layers_are_another_prediction(trained, tmp_path):
    before = pool.path_of(resolve(drawing(trained)), tmp_path)
    state = load_file(trained)
    save_file({n: v for n, v in state.items() if n.startswith("blocks.0")}, str(trained))
    assert before != pool.path_of(resolve(drawing(trained)), tmp_path)

"""Layers that ``cast`` stores in 8 bits, by its parameter ``layers``."""

from __future__ import annotations

import sys

import pytest
import torch

from harness.planner.worker import predict
from harness.resolve import resolve
from strategies.adapters.coded import Coded
from tests.made.publics import miniature


def coded(train_here, recipe: str) -> set[str]:
    spec = miniature("flux-dev", recipe)
    run, _ = train_here(spec, 1)
    parts = resolve(spec).recipe.strategies
    facts = next(part for part in parts if part.name == "cast").evidence(run.trained)
    named = run.trained.module.named_modules()
    names = {name.removesuffix(".base_layer") for name, m in named if isinstance(m, Coded)}
    assert facts["layers"] == len(names)
    return names


def test_all_layers_are_more_than_the_blocks(train_here):
    blocks = coded(train_here, "single+cast+lora")
    every = coded(train_here, "single+cast:layers=all+lora")
    linears = {
        name
        for name, m in resolve(miniature("flux-dev", "single"))
        .subject.build(0, "awake")
        .named_modules()
        if type(m) is torch.nn.Linear
    }
    assert blocks < every and every == linears


def test_codes_need_no_bitsandbytes(train_here, monkeypatch):
    monkeypatch.setitem(sys.modules, "strategies.adapters.quantised_base", None)  # it imports that
    assert coded(train_here, "single+cast+lora")


def test_more_layers_are_predicted():
    asked = {"device": "cuda"}
    few, more = (
        predict(
            resolve(miniature("flux-dev", f"single+bf16_pure+cast:layers={some}+lora", **asked))
        )
        for some in ("blocks", "all")
    )
    assert more.method == "trace", more.reason
    weights = [found.steady.categories["parameters"] for found in (few, more)]
    assert weights[1] < weights[0]


@pytest.mark.parametrize(("recipe", "processes"), [("single+cast:layers=all+head", 1),
                                                   ("fsdp2+cast:layers=all+lora", 2)])  # fmt: skip
def test_where_only_the_blocks_are_coded(recipe, processes):
    found = resolve(miniature("flux-dev", recipe, processes=processes)).refusal
    assert "leave layers out" in str(found)

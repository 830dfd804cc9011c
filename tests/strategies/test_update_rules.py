"""What each optimizer of the table computes, against torch's own of the same rule in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import SUBJECT, part_named

from strategies import parse
from strategies.base import Settings
from strategies.optimizers.table import TABLE

SETTINGS = Settings(learning_rate=1e-3, betas=(0.8, 0.95), weight_decay=0.1)
SHAPE, STEPS = (96, 64), 8
OWN = {"lr": SETTINGS.learning_rate, "weight_decay": SETTINGS.weight_decay}


ADAMW = partial(torch.optim.AdamW, foreach=False, **SETTINGS.adam)
MUON = partial(torch.optim.Muon, momentum=0.95, adjust_lr_fn="match_rms_adamw", **OWN)
EXACT = 1e-4
CASES: dict[str, tuple[Callable[[Any], Any], float]] = {
    "adamw": (ADAMW, EXACT),
    "adamw:impl=foreach": (ADAMW, EXACT),
    "adamw:impl=plain": (ADAMW, EXACT),
    "adam8bit": (ADAMW, 0.02),
    "adam8bit:lib=torchao": (ADAMW, 0.02),
    "adam4bit": (ADAMW, 0.25),
    "adam16bit": (ADAMW, 0.01),
    "adafactor": (partial(torch.optim.Adafactor, **OWN), EXACT),
    "muon": (lambda params: MUON(params[:1]), 0.02),
    "sgd": (partial(torch.optim.SGD, momentum=0.9, **OWN), EXACT),
    "sgd:momentum=0.0": (partial(torch.optim.SGD, momentum=0.0, **OWN), EXACT),
    "adamw_bf16": (ADAMW, 0.06),
    "adamw_bf16:write=kahan": (ADAMW, 0.005),
    "adafactor:write=stochastic": (partial(torch.optim.Adafactor, **OWN), 0.1),
    "adam8bit:write=kahan": (ADAMW, 0.005),
}
"""Part of a recipe -> torch's optimizer of its rule, and the largest relative error: but for 4 bits
less than AdamW's usual betas (0.04) or no decay (0.13) would make."""
ELSEWHERE = {"paged_adam8bit", "offload_adamw", "came", "prodigy"}
"""The first two step by the classes of adam8bit and adamw, in memory that a GPU's driver has alone;
the others by packages of one file, whose classes, steps and bytes a run checks."""


def moved(make: Callable[[Any], Any], weights: torch.dtype, rule: torch.dtype) -> torch.Tensor:
    """How far steps move a matrix; what an optimizer carries beside a weight counts."""
    draw = torch.Generator().manual_seed(0)
    first = [torch.randn(shape, generator=draw).to(weights).to(rule) for shape in (SHAPE, (64,))]
    params = [torch.nn.Parameter(value.clone()) for value in first]
    params[0].hidden_matrix = True
    ways = [torch.randn(p.shape, generator=draw) for p in params]
    torch.manual_seed(0)
    optimizer = make(params)
    for _ in range(STEPS):
        for p, way in zip(params, ways, strict=True):
            noise = torch.randn(p.shape, generator=draw)
            p.grad = (way + noise).to(weights).to(rule)
        optimizer.step()
    carried = optimizer.state[params[0]].get("carried", torch.zeros(()))
    return params[0].detach().double() + carried.double() - first[0].double()


def distance(text: str) -> float:
    """Of the steps of ``text`` from those of the rule, relative; of weights rounded by chance, the
    share of the rule's way that they did not go."""
    pure = "bf16_pure+" if "bf16" in text or "write" in text else ""
    part = part_named(f"single+{pure}{text}", text.partition(":")[0])
    launch = parse("single").launch("cpu", 1, SUBJECT)
    weights = torch.bfloat16 if pure else torch.float32
    found = moved(lambda p: part.make_optimizer(p, SETTINGS, launch), weights, weights)
    wanted = moved(CASES[text][0], weights, torch.float64)
    if pure:
        return abs(1 - float((found * wanted).sum() / wanted.square().sum()))
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("text", CASES)
def test_an_update_is_that_of_the_rule(text):
    assert distance(text) <= CASES[text][1]


def test_every_optimizer_of_the_table_has_a_case():
    assert {text.partition(":")[0] for text in CASES} | ELSEWHERE == set(TABLE)

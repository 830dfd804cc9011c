"""What each optimizer of the table computes, against its rule in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from conftest import SUBJECT

from strategies import CATALOG
from strategies.base import Settings
from strategies.evidence.rules import relative_error
from strategies.optimizers import bf16_adamw
from strategies.optimizers.table import TABLE
from tests.conftest import part_named

SETTINGS = Settings(learning_rate=1e-3, betas=(0.8, 0.95), weight_decay=0.1)
SHAPE = (96, 64)
STEPS = 3
BLOCK = 256


class Update(NamedTuple):
    """A matrix ("weight"), its gradient ("grad") and its state, before and after one step."""

    before: dict[str, Any]
    after: dict[str, Any]


# ---- the rules ----


def doubles(side: dict[str, Any]) -> dict[str, Any]:
    return {name: v if isinstance(v, float) else v.double() for name, v in side.items()}


def weight_error(update: Update, moved: torch.Tensor) -> float:
    """The relative error of the weight after the step, which should have ``moved`` it; a unit in
    the last place of the weight is no error."""
    weight = update.before["weight"]
    off = (update.after["weight"].double() - weight.double() - moved).abs()
    ulp = torch.finfo(weight.dtype).eps * weight.double().abs()
    return float((off - 2 * ulp).clamp_min(0).norm() / moved.norm())


def adamw(update: Update, settings: Settings) -> tuple[Any, Any, Any]:
    """AdamW's update of the weight, and both moments after the step, in float64."""
    (beta1, beta2), was, step = settings.betas, doubles(update.before), update.after["step"]
    gradient = was["grad"]
    first = was["exp_avg"].lerp(gradient, 1 - beta1)
    second = was["exp_avg_sq"].lerp(gradient.square(), 1 - beta2)
    scale = (second / (1 - beta2**step)).sqrt() + settings.eps
    rate, decay = settings.learning_rate, settings.weight_decay * was["weight"]
    return -rate * (first / (1 - beta1**step) / scale + decay), first, second


def adamw_error(update: Update, settings: Settings, part: Any) -> float:
    moved, first, second = adamw(update, settings)
    moments = (("exp_avg", first), ("exp_avg_sq", second))
    return max(
        weight_error(update, moved), *(relative_error(update.after[n], w) for n, w in moments)
    )


def low_bit_error(update: Update, settings: Settings, part: Any) -> float:
    """The same of the weight only: moments are quantized after the weight's update."""
    return weight_error(update, adamw(update, settings)[0])


def adafactor(update: Update, settings: Settings) -> torch.Tensor:
    """``torch.optim.Adafactor``'s update by its defaults: Shazeer and Stern 2018
    (arXiv:1804.04235), algorithm 4 without a first moment."""
    was, step = doubles(update.before), update.after["step"]
    weight, gradient = was["weight"], was["grad"]
    rate = 1 - step**-0.8
    squares = gradient.square()
    row = rate * was["row_var"] + (1 - rate) * squares.mean(-1, keepdim=True)
    column = rate * was["col_var"] + (1 - rate) * squares.mean(-2, keepdim=True)
    least = torch.finfo(update.before["row_var"].dtype).eps
    variance = row @ column / row.mean(-2, keepdim=True).clamp_min(least)
    direction = gradient / variance.clamp_min(least * least).sqrt()
    root = weight.numel() ** 0.5
    size = max(1e-3, float(weight.norm()) / root) * min(settings.learning_rate, step**-0.5)
    moved = -size * direction / max(1.0, float(direction.norm()) / root)
    return moved - settings.learning_rate * settings.weight_decay * weight


def adafactor_error(update: Update, settings: Settings, part: Any) -> float:
    return weight_error(update, adafactor(update, settings))


def sgd_error(update: Update, settings: Settings, part: Any) -> float:
    was = doubles(update.before)
    wanted = was["grad"] + settings.weight_decay * was["weight"]
    if not part.momentum:
        return weight_error(update, -settings.learning_rate * wanted)
    if "momentum_buffer" not in was:
        return float("inf")
    wanted = part.momentum * was["momentum_buffer"] + wanted
    kept = relative_error(update.after["momentum_buffer"], wanted)
    return max(weight_error(update, -settings.learning_rate * wanted), kept)


def muon_error(update: Update, settings: Settings, part: Any) -> float:
    """The momentum by Muon's rule, and the share of singular values of the update that are not
    near one: Newton-Schulz iteration maps them to between 0.5 and 1.5."""
    was = doubles(update.before)
    kept = was["momentum_buffer"].lerp(was["grad"], 1 - part.momentum)
    size = settings.learning_rate * 0.2 * max(kept.shape) ** 0.5
    weight = (1 - settings.learning_rate * settings.weight_decay) * was["weight"]
    found = torch.linalg.svdvals((weight - update.after["weight"].double()) / size)
    away = float(((found < 0.5) | (found > 1.5)).double().mean())
    return max(relative_error(update.after["momentum_buffer"], kept), away)


def bf16_error(update: Update, settings: Settings, part: Any) -> float:
    """The share of its rule's update that a bfloat16 weight did not take."""
    was, now = doubles(update.before), doubles(update.after)
    factored = part.name == "adafactor"
    moved = adafactor(update, settings) if factored else adamw(update, settings)[0]
    carried = [side.get("carried", 0 * moved) for side in (was, now)]
    went = now["weight"] - was["weight"] + carried[1] - carried[0]
    size = float(moved.square().sum())
    half = torch.finfo(torch.bfloat16).eps * was["weight"].abs() / 2
    chance = 0.0 if "carried" in now else float((half * moved).square().sum().sqrt()) / size
    return max(0.0, abs(float((went * moved).sum()) / size - 1) - 6 * chance)


# ---- one watched step ----


def decoded(state: dict[str, Any]) -> dict[str, Any]:
    """A state with its quantized moments as numbers, by AdamW's names."""
    if "state1" in state:
        names = {"exp_avg": "1", "exp_avg_sq": "2"}
        found = {name: looked_up(state, number) for name, number in names.items()}
        return {**state, **found}
    plain = {n: v for n, v in state.items() if hasattr(v, "dequantize") and n.startswith("exp")}
    return {**state, **{n: v.dequantize() for n, v in plain.items()}}


def looked_up(state: dict[str, Any], number: str) -> torch.Tensor:
    codes = state[f"state{number}"]
    scales = state[f"absmax{number}"].repeat_interleave(BLOCK)[: codes.numel()]
    values = state[f"qmap{number}"][codes.flatten().long()] * scales
    return values.view_as(codes)


def copied(p: torch.nn.Parameter, optimizer: Any) -> dict[str, Any]:
    found = {"weight": p.detach(), "grad": p.grad, **decoded(optimizer.state[p])}
    side = {n: v.detach().clone() for n, v in found.items() if torch.is_tensor(v)}
    return side | {"step": float(optimizer.state[p].get("step", 0))}


def watched(part: Any, settings: Settings) -> Update:
    """The last of some steps of the optimizer of ``part``."""
    draw = torch.Generator().manual_seed(0)
    written = getattr(part, "write", "nearest")
    dtype = torch.float32 if written == "nearest" else torch.bfloat16
    matrix, bias = (
        torch.nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in (SHAPE, (64,))
    )
    matrix.hidden_matrix = True
    launch = CATALOG["single"].launch("cpu", 1, SUBJECT)
    torch.manual_seed(0)
    optimizer = part.make_optimizer([matrix, bias], settings, launch)
    for step in range(STEPS):
        for p in (matrix, bias):
            p.grad = torch.randn(p.shape, generator=draw).to(dtype)
        before = copied(matrix, optimizer) if step else {}
        optimizer.step()
    return Update(before, copied(matrix, optimizer))


# ---- cases ----


EXACT = 1e-5
CASES: dict[str, tuple[Callable[[Update, Settings, Any], float], float]] = {
    "adamw": (adamw_error, EXACT),
    "adamw:impl=foreach": (adamw_error, EXACT),
    "adamw:impl=plain": (adamw_error, EXACT),
    "adam8bit": (low_bit_error, 0.01),
    "adam8bit:lib=torchao": (low_bit_error, 0.01),
    "adam4bit": (low_bit_error, 0.01),
    "adam16bit": (adamw_error, 0.01),  # moments in bfloat16 round by 0.4 %
    "adafactor": (adafactor_error, 1e-3),
    "muon": (muon_error, 0.1),
    "sgd": (sgd_error, EXACT),
    "sgd:momentum=0.0": (sgd_error, EXACT),
    "adamw_bf16": (bf16_error, 0.01),
    "adamw_bf16:write=kahan": (bf16_error, 0.01),
    "adafactor:write=stochastic": (bf16_error, 0.01),
    "adam8bit:write=kahan": (bf16_error, 0.02),
}
"""Part of a recipe -> its rule, and the largest relative error."""
ELSEWHERE = {"paged_adam8bit", "offload_adamw", "came", "prodigy"}
"""The first two step by the classes of adam8bit and adamw, in memory that a GPU's driver has alone;
the others by packages of one file, whose classes, steps and bytes a run checks."""


def part_of(text: str) -> Any:
    pure = "bf16_pure+" if "bf16" in text or "write" in text else ""
    return part_named(f"single+{pure}{text}", text.partition(":")[0])


@pytest.mark.parametrize("text", CASES)
def test_an_update_is_that_of_the_rule(text):
    part, (rule, off) = part_of(text), CASES[text]
    assert rule(watched(part, SETTINGS), SETTINGS, part) <= off


def test_every_optimizer_of_the_table_has_a_case():
    assert {text.partition(":")[0] for text in CASES} | ELSEWHERE == set(TABLE)


def dropped(weight, carried, update):
    return (weight.float() + update).to(weight.dtype), torch.zeros_like(carried)


NEAREST = {"rounded_by_chance": lambda x, _=None: x.to(torch.bfloat16), "compensated": dropped}


@pytest.mark.parametrize("text", ["adamw_bf16", "adamw_bf16:write=kahan",
                                  "adafactor:write=stochastic"])  # fmt: skip
def test_rounding_to_nearest_takes_almost_none_of_small_updates(text, monkeypatch):
    for name, function in NEAREST.items():
        monkeypatch.setattr(bf16_adamw, name, function)
    part = part_of(text)
    assert bf16_error(watched(part, SETTINGS), SETTINGS, part) > 0.1

"""What was asked for and what was predicted, made up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from harness.memory.record import CATEGORIES, Instant
from harness.planner import pool
from harness.prediction import Prediction, Work
from harness.resolve import Resolved, resolve
from harness.result import Result
from harness.spec import Spec

KIB, MIB, GIB = 2**10, 2**20, 2**30
XL = Spec(
    recipe="ddp", model="DiT-XL/2", data="synthetic", global_batch=256, processes=8, device="cuda"
)
FLUX = Spec(
    recipe="single+bf16_pure+lora:rank=16", model="flux-dev", objective="flow", data="synthetic",
    global_batch=1, device="cuda", ema=0.0,
)  # fmt: skip


def asked(recipe: str, **change):
    return resolve(dataclasses.replace(XL, recipe=recipe, **change))


def prediction(gib: float, **more) -> Prediction:
    size = int(gib * GIB)
    sums = {**dict.fromkeys(CATEGORIES, 0), "activations": size // 2, "parameters": size // 2}
    instant = Instant(bytes=size, phase="forward", op="op", site="", categories=sums, held=[])
    work = [Work(phase="forward", kind="product", dtype="float32", flops=10**12, bytes=1, count=1)]
    given = {"allocated": size, "reserved": size, "least": int(0.9 * size), "peak": instant}
    given |= {"host": instant, "work": work}
    return Prediction(recipe="ddp", device="cuda", method="trace", **{**given, **more})


def made_up(patch: pytest.MonkeyPatch, need: Callable[[Resolved], float | Prediction]) -> None:
    """Predict each row by ``need``: GiB, or a prediction."""

    def predict_all(rows: list[Resolved], *_: object, **__: object) -> list[Prediction]:
        found = [need(row) for row in rows]
        return [one if isinstance(one, Prediction) else prediction(one) for one in found]

    patch.setattr(pool, "predict_all", predict_all)


def prediction_of(result: Result, **more) -> Prediction:
    """A trace that saw in a step exactly what this run's own trace saw."""
    traced = result.ranks[0].categories
    sums = {name: getattr(traced, name, 0) for name in CATEGORIES}
    sums["temporaries"] = traced.workspace
    instant = Instant(
        bytes=traced.total, phase="backward", op="", site="", categories=sums, held=[]
    )
    spec = result.spec
    given = {"method": "trace", "peak": instant, "steady": instant}
    return Prediction(recipe=spec.recipe, device=spec.device, **{**given, **more})

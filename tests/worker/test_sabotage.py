"""Negative controls of parity: each way of training something else must read DIFFERS."""

from __future__ import annotations

import dataclasses
import math

import pytest
from conftest import TINY, Case, against, launched_together

from harness import ROOT
from harness.report.figures import parity
from harness.result import Result, Status
from harness.spec import Spec
from harness.worker.audit import gather
from harness.worker.loop import optimizer_step
from harness.worker.projections import Watch
from strategies import parse
from tests.made.publics import miniature
from tests.sabotage import SABOTAGES
from tests.sabotage.__main__ import faults

SPEC = Spec(
    recipe="single", model="DiT-T/4:depth=2", global_batch=8, warmup=2, steps=6, weight_decay=0.01
)
HALVES = dataclasses.replace(SPEC, recipe="single+accumulate:steps=2")


@pytest.fixture
def trained_as(train_here):
    """The result of so many steps of a spec, sabotaged or not."""

    def go(spec: Spec, sabotage=None) -> Result:
        run = train_here(spec, 0)
        if sabotage:
            sabotage(run)
        watch = Watch(run, run.feed)
        run.log.inputs = watch.inputs
        for step in range(spec.warmup + spec.steps):
            optimizer_step(run, step)
        return Result(
            status=Status.OK,
            spec=spec,
            losses=run.all_losses(),
            grad_norms=run.all_norms(),
            projections=watch.end(gather),
            parity=parse(spec.recipe).parity,
            evidence={"fp32": {"compute_dtype": "float32"}},
        )

    return go


KEPT: dict[str, Result] = {}
"""Rows that several tests compare with, trained once."""


@pytest.fixture
def reference(trained_as) -> Result:
    if "plain" not in KEPT:
        KEPT["plain"] = trained_as(SPEC)
    return KEPT["plain"]


@pytest.mark.parametrize("recipe", [HALVES.recipe, "single+checkpoint", "single+adamw:impl=plain"])
def test_the_same_computation_in_another_way_is_equal(recipe, trained_as, reference):
    row = trained_as(dataclasses.replace(SPEC, recipe=recipe))
    assert against(row, reference) == parity.Verdict("equal")


def test_gradients_that_are_rounding_alone_do_not_differ(trained_as):
    """Keys whose bias is a parameter of its own: two equal runs make of it what they like."""
    spec = dataclasses.replace(miniature("dit-xl-2", "single"), global_batch=4, warmup=2, steps=8)
    row = trained_as(dataclasses.replace(spec, recipe="single+accumulate:steps=2"))
    reference = trained_as(spec)
    ours, theirs = row.projections.moment, reference.projections.moment
    keys = [name for name in theirs if "to_k.bias" in name]
    apart = [math.dist(ours[name], theirs[name]) / math.hypot(*theirs[name]) for name in keys]
    assert max(apart) > 0.01, "else this shows nothing"
    assert against(row, reference) == parity.Verdict("equal")
    assert against(trained_as(spec, SABOTAGES["stale"]), reference).word == "DIFFERS"


@pytest.mark.parametrize("name", ["doubled_behind_the_norm", "stale"])
def test_a_row_that_only_rounds_is_held_to_its_gradients(name, trained_as, reference):
    spec = dataclasses.replace(SPEC, recipe="single+bf16")
    if "bf16" not in KEPT:
        KEPT["bf16"] = trained_as(spec)
    rounds, row = KEPT["bf16"], trained_as(spec, SABOTAGES[name])
    assert against(rounds, reference).word == "by design"
    blind = dataclasses.replace(row, losses=rounds.losses, grad_norms=rounds.grad_norms)
    assert against(blind, reference).word == "DIFFERS"
    assert "moments" in against(blind, reference).what


def test_a_launched_control_is_void_and_keeps_its_curves(tmp_path):
    case = Case(TINY, fault="rounded")
    row = launched_together({"run": case}, tmp_path)["run"]
    assert row.status is Status.VOID and "altered: rounded" in row.reason
    assert len(row.losses) == len(row.grad_norms) >= TINY.warmup + TINY.steps


FEW = ("rounded", "stale", "one_parameter_not_stepped")
"""Faults of the default tests; the thorough ones have all."""
EACH = [pytest.param(name, marks=() if name in FEW else pytest.mark.thorough) for name in SABOTAGES]


@pytest.mark.parametrize("name", EACH)
def test_another_computation_differs(name, trained_as, reference):
    spec = HALVES if "micro_batch" in name else SPEC
    row = trained_as(spec, SABOTAGES[name])
    assert against(row, reference).word == "DIFFERS"
    # Without losses and norms too: what was done to the weights gives each of them away.
    blind = dataclasses.replace(row, losses=reference.losses, grad_norms=reference.grad_norms)
    assert against(blind, reference).word == "DIFFERS"
    assert name != "one_parameter_not_stepped" or "of blocks." in against(blind, reference).what


def test_each_planted_fault_stands_in_one_line():
    """``python -m tests.sabotage`` applies them."""
    assert len(faults()) >= 40 and all(
        (ROOT / name).exists() for f in faults() for name in f.tests.split()
    )

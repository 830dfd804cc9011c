"""What compiling costs and where it stops short: seconds and graph breaks, in rows and reports."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from conftest import TINY, part_named
from torch._dynamo.utils import cumulative_time_spent_ns

from harness.report import build
from harness.report.rendering.tables import group_grids
from harness.subjects.dit.model import attend
from harness.worker.loop import optimizer_step
from strategies.activations.compile import Compile, CountingBackend
from tests.made.results import done

RECIPE = "single+compile:backend=aot_eager"


def compiled(train_here, steps: int, recipe: str = RECIPE):
    """Its evidence, and the seconds of each step."""
    run, log = train_here(dataclasses.replace(TINY, recipe=recipe), 0)
    seconds = []
    for step in range(steps):
        began = time.perf_counter()
        optimizer_step(run, step, log)
        seconds.append(time.perf_counter() - began)
    return part_named(recipe, "compile").evidence(run.trained), seconds


def test_a_budget_keeps_fewer_activations(train_here):
    """Of what is kept above the blocks' inputs, the share that was asked for."""
    kept = [
        compiled(train_here, 1, f"{RECIPE},budget={budget}")[0]["kept_bytes"]
        for budget in (1.0, 0.5, 0.0)
    ]
    assert kept[1] - kept[2] <= 0.55 * (kept[0] - kept[2]) and kept[2] < kept[1] < kept[0]


def test_the_seconds_are_dynamos_own_and_within_the_first_step(train_here, monkeypatch):
    spent, call = [], CountingBackend.__call__

    def timed(self, graph, inputs, **options):
        began = time.perf_counter()
        made = call(self, graph, inputs, **options)
        spent.append(time.perf_counter() - began)
        return made

    monkeypatch.setattr(CountingBackend, "__call__", timed)
    facts, (first, _) = compiled(train_here, 2)
    own = cumulative_time_spent_ns
    whole = (own["entire_frame_compile"] + own["entire_backward_compile"]) / 1e9
    assert facts["compile_seconds"] == pytest.approx(whole, abs=0.05)
    assert sum(spent) < facts["compile_seconds"] < first, "tracing comes before the backend"


def breaking(q_BNTK, k_BNTK, v_BNTK):
    torch._dynamo.graph_break()
    return attend(q_BNTK, k_BNTK, v_BNTK)


def test_a_deliberate_graph_break_is_counted(train_here, monkeypatch):
    whole, _ = compiled(train_here, 2)
    edit = Compile.edit_model

    def with_a_break(self, module, subject):
        for block in module.blocks:
            block.attn.attend = breaking
        edit(self, module, subject)

    monkeypatch.setattr(Compile, "edit_model", with_a_break)
    broken, _ = compiled(train_here, 2)
    assert (whole["graph_breaks"], whole["graphs"], whole["calls"]) == (0, 1, 4)
    assert broken["graph_breaks"] >= 1 and broken["graphs"] > 1 and broken["calls"] > 4


def test_a_report_shows_both_where_something_was_compiled():
    parts = (24.0, 24.0, 48.0, 24.0, 9.0, 0.0)
    plain, other = (done(recipe, 1.0, parts, processes=1) for recipe in ("single", RECIPE))
    assert not {"Compile s", "Graph breaks"} & set(time_table(plain).heads)
    other.evidence["compile"] = {"compile_seconds": 33.7, "graph_breaks": 0}
    found = time_table(plain, other)
    lines = [dict(zip(found.heads, line, strict=True)) for line in found.lines]
    cells = {line["Recipe"]: (line["Compile s"], line["Graph breaks"]) for line in lines}
    assert cells[RECIPE] == ("33.70", "0") and "33.70" not in cells["single"]


def time_table(*results):
    """The table of times of these rows."""
    (group,) = build(list(results), []).groups
    return next(grid for grid in group_grids(group) if grid.key == "time")

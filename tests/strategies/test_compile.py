"""What compiling costs and where it stops short: seconds and graph breaks, in rows and reports, and
CUDA graphs that were not recorded."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from conftest import TINY, part_named
from torch._dynamo.utils import cumulative_time_spent_ns
from torch._inductor import config as inductor

from harness.report import build
from harness.report.rendering.tables import group_grids
from harness.resolve import resolve
from harness.spec import Spec
from harness.subjects.dit.model import attend
from harness.worker.loop import optimizer_step
from strategies.activations.compile import Compile, CountingBackend, check_replays
from strategies.base import NotInForce
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


# -- CUDA graphs ----------------------------------------------------------------------------------

GRAPHS = "single+compile:mode=reduce-overhead"
QUICK = {"aot_inductor.debug_compile": True, "cpp.simdlen": 1}
"""Inductor's settings with which its C++ compiles fast."""


def test_inductor_is_given_the_mode_as_torch_compile_gives_it():
    assert (
        CountingBackend("inductor", "reduce-overhead").backend.config["triton.cudagraphs"] is True
    )
    assert CountingBackend("inductor").recordings is None


@pytest.mark.thorough
def test_graphs_that_inductor_skips_are_not_in_force(train_here):
    """A CPU has none: the mode is passed on, and its evidence says that nothing was recorded."""
    spec = dataclasses.replace(TINY, recipe=GRAPHS)
    with inductor.patch(QUICK):
        run, _ = train_here(spec, 3)
    with pytest.raises(NotInForce, match=r"skipped \d+ CUDA graphs"):
        part_named(GRAPHS, "compile").evidence(run.trained)


def steps(*counts: tuple[int, int, int, int]) -> list[dict[str, float]]:
    names = "calls", "recorded", "replays", "skipped"
    return [dict(zip(names, one, strict=True)) for one in counts]


WARM, RECORDING = (4, 0, 0, 0), (8, 8, 0, 0)


def test_a_step_of_replays_alone_shows_the_graphs():
    found = check_replays(steps(WARM, RECORDING, (12, 8, 8, 0)))
    assert found == {"cuda_graphs": 8, "cuda_graph_replays": 8}


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ((WARM, RECORDING), "from the third on"),
        ((WARM, RECORDING, (12, 8, 2, 0)), "replayed 2 CUDA graphs, expected 4"),
        ((WARM, RECORDING, (12, 16, 4, 0)), "8 CUDA graphs were recorded in the last step"),
        ((WARM, RECORDING, (12, 8, 8, 1)), "skipped 1 CUDA graphs"),
        ((WARM, WARM, WARM), "expected 0"),
    ],
)
def test_graphs_that_were_not_replayed_are_not_in_force(counts, why):
    with pytest.raises(NotInForce, match=why):
        check_replays(steps(*counts))


@pytest.mark.parametrize(
    ("recipe", "more", "why"),
    [
        (GRAPHS, {"workload": "sample", "objective": "flow"}, "leave mode=reduce-overhead out"),
        (f"{GRAPHS}+accumulate", {}, "leave accumulate or mode=reduce-overhead out"),
        (GRAPHS.replace("single", "zero3"), {"processes": 2}, "take ddp, zero1 or zero2"),
        (GRAPHS.replace("single", "fsdp2"), {"processes": 2}, "take ddp, zero1 or zero2"),
    ],
)
def test_steps_whose_graphs_would_be_wrong_are_refused(recipe, more, why):
    row = resolve(Spec(recipe=recipe, data="synthetic", device="cuda", **more))
    assert why in str(row.refusal)


def test_graphs_need_a_gpu():
    """They are not dropped in silence where they have no effect (``requirements.lacks``)."""
    row = resolve(Spec(recipe=GRAPHS, data="synthetic"))
    assert "cuda" in part_named(GRAPHS, "compile").requires(row.launch)
    assert "cuda" not in part_named("single+compile", "compile").requires(row.launch)

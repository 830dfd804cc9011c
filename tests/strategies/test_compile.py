"""Where compiling stops short: graph breaks, and CUDA graphs that were not recorded."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import TINY, part_named

from harness.resolve import resolve
from harness.spec import Spec
from harness.subjects.dit.model import attend
from strategies.activations.compile import Compile, check_replays
from strategies.base import NotInForce

RECIPE = "single+compile:backend=aot_eager"


def compiled(train_here, steps: int, recipe: str = RECIPE):
    """Its evidence."""
    run = train_here(dataclasses.replace(TINY, recipe=recipe), steps)
    return part_named(recipe, "compile").evidence(run)


def test_a_budget_keeps_fewer_activations(train_here):
    """Of what is kept above the blocks' inputs, the share that was asked for."""
    kept = [
        compiled(train_here, 1, f"{RECIPE},budget={budget}")["kept_bytes"]
        for budget in (1.0, 0.5, 0.0)
    ]
    assert kept[1] - kept[2] <= 0.55 * (kept[0] - kept[2]) and kept[2] < kept[1] < kept[0]


def breaking(q_BNTK, k_BNTK, v_BNTK):
    torch._dynamo.graph_break()
    return attend(q_BNTK, k_BNTK, v_BNTK)


def test_a_deliberate_graph_break_is_counted(train_here, monkeypatch):
    whole = compiled(train_here, 2)
    edit = Compile.edit_model

    def with_a_break(self, module, subject):
        for block in module.blocks:
            block.attn.attend = breaking
        edit(self, module, subject)

    monkeypatch.setattr(Compile, "edit_model", with_a_break)
    broken = compiled(train_here, 2)
    assert (whole["graph_breaks"], whole["graphs"], whole["calls"]) == (0, 1, 4)
    assert broken["graph_breaks"] >= 1 and broken["graphs"] > 1 and broken["calls"] > 4


# -- CUDA graphs ----------------------------------------------------------------------------------

GRAPHS = "single+compile:mode=reduce-overhead"


def steps(*last: int) -> list[dict[str, float]]:
    """A step before recording, one that records, and a last one."""
    names = "calls", "recorded", "replays", "skipped"
    return [dict(zip(names, one, strict=True)) for one in ((4, 0, 0, 0), (8, 8, 0, 0), last)]


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ((12, 8, 2, 0), "replayed 2 CUDA graphs, expected 4"),
        ((12, 16, 4, 0), "8 CUDA graphs were recorded in the last step"),
        ((12, 8, 8, 1), "skipped 1 CUDA graphs"),
    ],
)
def test_graphs_that_were_not_replayed_are_not_in_force(last, why):
    found = check_replays(steps(12, 8, 8, 0))
    assert found == {"cuda_graphs": 8, "cuda_graph_replays": 8}
    with pytest.raises(NotInForce, match=why):
        check_replays(steps(*last))


def test_graphs_need_a_gpu():
    """They are not dropped in silence where they have no effect (``requirements.lacks``)."""
    row = resolve(Spec(recipe=GRAPHS, data="synthetic"))
    assert "cuda" in part_named(GRAPHS, "compile").requires(row.launch)
    assert "cuda" not in part_named("single+compile", "compile").requires(row.launch)

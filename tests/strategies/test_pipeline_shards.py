"""Stages of a pipeline that ranks share by FSDP2, held to ddp's losses, norms and updates."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from conftest import TINY, Case, launched_together, verdict

from harness.report.figures import parity
from harness.result import Result
from strategies import parse

# As in test_pipeline: what is equal is equal because all clip, decay and step alike.
FOUR = dataclasses.replace(
    TINY, recipe="ddp", processes=4, global_batch=8, steps=3, learning_rate=1e-3, weight_decay=0.01,
    beta2=0.99, grad_clip=0.25, ema=0.9,
)  # fmt: skip
EQUAL = [
    "pp_fsdp2",
    "pp_fsdp2:reshard=on+checkpoint",
    "pp_fsdp2:schedule=interleaved",
    "pp_fsdp2:schedule=zero_bubble",
    "pp_fsdp2:schedule=zbv",
]
OTHERS = ["pp_fsdp2+bf16"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[dict[str, Result], Path]:
    """Name -> result, and where the folders of those names are."""
    base = tmp_path_factory.mktemp("pipeline_shards")

    def case(recipe: str, *words: str, ranks: int = 4, steps: int = 3) -> Case:
        return Case(dataclasses.replace(FOUR, recipe=recipe, steps=steps, processes=ranks), words)

    cases = {recipe: case(recipe) for recipe in (*EQUAL, *OTHERS)}
    cases["ddp"] = case("ddp", ranks=2)
    return launched_together(cases, base), base


@pytest.mark.parametrize("row", [*EQUAL, *OTHERS], indirect=True)
def test_ranks_of_a_stage_show_that_they_share_it(row):
    assert [check for check in row.audit if not check.ok] == []
    facts = row.evidence[parse(row.spec.recipe).sharding.name]
    print(facts)


@pytest.mark.parametrize("row", EQUAL, indirect=True)
def test_losses_gradients_and_updates_are_those_of_whole_models(row, runs):
    assert verdict(row, runs) == parity.Verdict("equal"), parity.distances(row, runs[0]["ddp"])

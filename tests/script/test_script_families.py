"""Scripts of Flux and SD3 under the launch files of two processes, with added strategies.

Their memory is held to that of the harness's own loop for the same class and configuration.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from conftest import Case, OnDemand, begin, launched_together

from harness.report.figures import parity
from harness.result import Result, Status
from harness.script import model
from harness.spec import Spec
from tests.made import script_rows
from tests.made.script_rows import SCRIPTS, diffusion, measure

pytestmark = pytest.mark.thorough

ENGINES = ("ddp", "zero2", "zero3", "fsdp2")
OPTIONS = {"flux": ("--rank", "4"), "sd3": ("--checkpointing_steps", "2")}
"""Family -> options of its script. SD3 is trained whole; it saves as diffusers' examples do, on
rank 0 alone, and has text encoders of transformers, which zero3 must leave whole."""
ADDED = ("fsdp2+checkpoint",)
LAUNCHED = {"flux": ("ddp", "zero3", "fsdp2", *ADDED), "sd3": ENGINES}
CASES = {f"{name} {recipe}": (name, recipe) for name, own in LAUNCHED.items() for recipe in own}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return script_rows.pictures_and(tmp_path_factory.mktemp("families"), *OPTIONS)


@pytest.fixture(scope="module")
def rows(folder) -> OnDemand:
    def run(name: str):
        family, recipe = CASES[name]
        words = [*diffusion(folder, family, *OPTIONS[family]), "--max_train_steps", "10"]
        return measure(begin, recipe, folder / name, SCRIPTS / "train_diffusion.py", words)

    return OnDemand(run)


@pytest.fixture
def row(request, rows):
    found = rows[request.param]
    assert found.status is Status.OK, f"{found.reason}\n{found.log_tail}"
    return found


@pytest.mark.parametrize("row", [name for name in CASES if "+" not in name], indirect=True)
def test_a_family_trains_under_each_launch_file_as_under_ddp(row, rows):
    family = row.evidence["script"]["models"][0]
    reference = rows[next(n for n in CASES if n.endswith(" ddp") and n[:3] == family.lower()[:3])]
    far = parity.distances(row, reference)
    assert far.get("loss", 0.0) < parity.FLOAT32.loss and far.get("norm", 0.0) < parity.FLOAT32.norm


@pytest.mark.parametrize("row", ["flux fsdp2+checkpoint"], indirect=True)
def test_the_models_own_recomputation_is_in_force(row, rows):
    plain = rows["flux fsdp2"]
    assert parity.distances(row, plain)["loss"] < parity.FLOAT32.loss
    assert row.evidence["checkpoint"]["blocks_recomputed"] == 4
    held = [r.ranks[0].categories.activations for r in (row, plain)]
    assert held[0] < held[1]


@pytest.mark.parametrize("row", [f"sd3 {name}" for name in ENGINES], indirect=True)
def test_saves_on_one_rank_are_left_out_and_counted(row):
    assert row.evidence["script"]["skipped"]["save_state"] > 0


@pytest.fixture(scope="module")
def own(folder, tmp_path_factory) -> dict[str, Result]:
    """The harness's own rows of the SD3 that the script trains, with samples of equal shape."""
    spec = Spec(
        recipe="ddp", model="diffusers:SD3Transformer2DModel", data="synthetic",
        config=str(folder / "sd3" / "transformer" / "config.json"), resolution="128x128", text=32,
        objective="flow", global_batch=2, processes=2, warmup=1, steps=1, grad_clip=1.0, ema=0.0,
    )  # fmt: skip
    cases = {name: Case(dataclasses.replace(spec, recipe=name)) for name in ENGINES}
    return launched_together(cases, tmp_path_factory.mktemp("own"))


LATENT = 4 * 16 * 16 * 4
"""Bytes of one sample."""
UNREAD = 32 * 32 + 32
"""Elements of a layer whose results SD3 does not read. The own loop freezes it."""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_script_holds_the_bytes_of_the_own_loop_for_the_same_model(rows, own, engine):
    script, ours = rows[f"sd3 {engine}"], own[engine]
    assert ours.status is Status.OK, f"{ours.reason}\n{ours.log_tail}"
    found, expected = script.ranks[0].categories, ours.ranks[0].categories
    assert found.phase == expected.phase and found.where == expected.where
    assert found.parameters == expected.parameters
    assert 0 <= found.gradients - expected.gradients <= 4 * UNREAD
    assert 0 < found.optimizer_state - expected.optimizer_state <= 12 * UNREAD
    assert 0 < found.activations - expected.activations <= 5 * LATENT
    assert 0 < found.workspace - expected.workspace <= 8 * LATENT


@pytest.mark.parametrize("row", ["sd3 fsdp2"], indirect=True)
def test_whole_parameters_that_a_script_keeps_are_named(row, rows):
    """The script's ``trained`` holds what ``fully_shard`` has replaced."""
    kept = row.evidence["script"]["resident_models"][model.REPLACED]
    assert kept == 4 * row.evidence["script"]["trained_parameters"]
    assert model.REPLACED not in rows["sd3 ddp"].evidence["script"]["resident_models"]

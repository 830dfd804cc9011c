"""A script of diffusers' kind under the launch files of two processes, whole and with LoRA."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from conftest import Case, OnDemand, begin, launched_together

from harness.report.figures import parity
from harness.result import Result, Status
from harness.script import model
from harness.spec import Spec
from tests.made.script_rows import SCRIPTS, diffusion, measure, pipeline

pytestmark = pytest.mark.thorough

ENGINES = ("ddp", "zero2", "zero3", "fsdp2")
OPTIONS = {"lora": ("--rank", "4"), "whole": ("--checkpointing_steps", "2")}
"""What is trained -> options. It saves on rank 0 alone, and has a text encoder of transformers,
which zero3 must leave whole."""
CASES = [f"whole {engine}" for engine in ENGINES] + ["lora ddp", "lora zero3", "lora fsdp2"]


@pytest.fixture(scope="module")
def flux(tmp_path_factory) -> Path:
    return pipeline(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def rows(flux) -> OnDemand:
    def run(name: str) -> Result:
        kind, recipe = name.split()
        words = [*diffusion(flux, *OPTIONS[kind]), "--max_train_steps", "10"]
        row = measure(begin, recipe, flux / name, SCRIPTS / "train_diffusion.py", words)
        assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
        return row

    return OnDemand(run)


@pytest.mark.parametrize("name", CASES)
def test_a_family_trains_under_each_launch_file_as_under_ddp(name, rows):
    far = parity.distances(rows[name], rows[f"{name.split()[0]} ddp"])
    assert far.get("loss", 0.0) < parity.FLOAT32.loss and far.get("norm", 0.0) < parity.FLOAT32.norm


def test_the_models_own_recomputation_is_in_force(rows):
    row, plain = rows["lora fsdp2+checkpoint"], rows["lora fsdp2"]
    assert parity.distances(row, plain)["loss"] < parity.FLOAT32.loss
    assert row.evidence["checkpoint"]["blocks_recomputed"] == 4
    held = [r.ranks[0].categories.activations for r in (row, plain)]
    assert held[0] < held[1]


@pytest.fixture(scope="module")
def own(flux, tmp_path_factory) -> dict[str, Result]:
    """The harness's own rows of the same transformer, with samples of equal shape."""
    spec = Spec(
        recipe="ddp", model="diffusers:FluxTransformer2DModel", data="synthetic",
        config=str(flux / "transformer" / "config.json"), resolution="128x128", text=16,
        objective="flow", global_batch=2, processes=2, warmup=1, steps=1, grad_clip=1.0, ema=0.0,
    )  # fmt: skip
    cases = {name: Case(dataclasses.replace(spec, recipe=name)) for name in ENGINES}
    return launched_together(cases, tmp_path_factory.mktemp("own"))


LATENT = 4 * 16 * 16 * 4
"""Bytes of one sample."""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_script_holds_the_bytes_of_the_own_loop_for_the_same_model(rows, own, engine):
    script, ours = rows[f"whole {engine}"], own[engine]
    assert ours.status is Status.OK, f"{ours.reason}\n{ours.log_tail}"
    assert script.evidence["script"]["skipped"]["save_state"] > 0, "left out on rank 0, and counted"
    found, expected = script.ranks[0].categories, ours.ranks[0].categories
    assert found.phase == expected.phase and found.where == expected.where
    assert found.parameters == expected.parameters and found.gradients == expected.gradients
    assert found.optimizer_state == expected.optimizer_state
    assert 0 < found.activations - expected.activations <= 5 * LATENT
    assert abs(found.workspace - expected.workspace) <= 8 * LATENT


def test_whole_parameters_that_a_script_keeps_are_named(rows):
    """The script's ``trained`` holds what ``fully_shard`` has replaced."""
    facts, others = (rows[f"whole {name}"].evidence["script"] for name in ("fsdp2", "ddp"))
    assert facts["resident_models"][model.REPLACED] == 4 * facts["trained_parameters"]
    assert model.REPLACED not in others["resident_models"]

"""Watching changes nothing: a script's losses with and without the runner are equal bit for bit."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from conftest import OnDemand, begin, launchable

from harness.result import Result, Status
from tests.made import one_start, script_rows
from tests.made.script_rows import SCRIPTS, alone, diffusion, measure

SEEDED = ("--seed", "1", "--max_train_steps", "9")
SCRIPT_OF = {
    "plain": SEEDED,
    "accumulation": (*SEEDED, "--gradient_accumulation_steps", "2"),
    "two optimizers": (*SEEDED, "--two_optimizers"),
    "LoRA": ("--rank", "4"),
    "EMA and validation": ("--use_ema", "--validation_steps", "2"),
    "resumed": ("--resume_from_checkpoint",),
}
"""Case -> options of a script: of ``train`` the first three, of ``train_diffusion`` the others."""
OFTEN = {"plain", "accumulation", "two optimizers"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> OnDemand:
    """Case -> (the script's own losses, its row)."""
    folder = tmp_path_factory.mktemp("scripts")
    made = OnDemand(lambda _: script_rows.pipeline(folder))

    def both(name: str) -> tuple[list[float], Result]:
        script, words = "train", list(SCRIPT_OF[name])
        if name not in OFTEN:
            script = "train_diffusion"
            words = [*diffusion(made["flux"], *words), "--max_train_steps", "10"]
        first, out = folder / name / "alone", folder / name / "watched"
        start = one_start.running(begin)
        if name == "resumed":
            saving = [w for w in words if w != "--resume_from_checkpoint"]
            saving += ["--checkpointing_steps", "2", "--max_train_steps", "2"]
            alone(start, script, saving, first)
            shutil.copytree(first, out / "output")
        own = alone(start, script, words, first)
        return own, measure(begin, "single", out, SCRIPTS / f"{script}.py", words)

    return OnDemand(both)


@pytest.mark.parametrize("name", launchable(SCRIPT_OF, OFTEN))
def test_watched_losses_are_the_scripts_own_bit_for_bit(pairs, name):
    own, row = pairs[name]
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    steps = torch.tensor(own).view(-1, row.accumulation).mean(dim=1).tolist()
    assert len(row.losses) >= 3 and row.losses == steps[: len(row.losses)]


@pytest.mark.thorough
def test_a_script_starts_again_where_it_was_saved(pairs):
    own, _ = pairs["resumed"]
    whole, _ = pairs["EMA and validation"]
    assert len(own) == 8 and len(whole) == 10


def test_categories_are_the_models_own_bytes(pairs):
    row = pairs["plain"][1]
    facts, found = row.evidence["script"], row.ranks[0].categories
    assert facts["trained_parameters"] == facts["parameters"] == found.parameters / 4
    assert math.isclose(found.optimizer_state, 2 * found.parameters, rel_tol=0.01)
    assert found.resident == 0


@pytest.mark.thorough
def test_models_beside_the_trained_one_are_a_category(pairs):
    row = pairs["LoRA"][1]
    facts, found = row.evidence["script"], row.ranks[0].categories
    assert list(facts["resident_models"]) == ["AutoencoderKL"]
    assert found.resident == facts["resident_models"]["AutoencoderKL"] > 0
    assert 0 < facts["trained_parameters"] < facts["parameters"] / 2
    assert math.isclose(found.optimizer_state, 8 * facts["trained_parameters"], rel_tol=0.1)


@pytest.mark.thorough
def test_an_average_of_the_weights_is_a_category(pairs):
    row = pairs["EMA and validation"][1]
    assert row.ranks[0].categories.ema == 4 * row.evidence["script"]["trained_parameters"]

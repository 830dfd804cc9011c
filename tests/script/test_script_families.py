"""Scripts of Flux, SD3 and Wan under the launch files of two processes, with added strategies."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import OnDemand, begin

from harness.report.figures import parity
from harness.result import Status
from tests.made import script_rows
from tests.made.script_rows import SCRIPTS, diffusion, measure

ENGINES = ("ddp", "zero2", "zero3", "fsdp2")
OPTIONS = {
    "flux": ("--rank", "4"),
    "sd3": ("--checkpointing_steps", "2"),
    "wan": ("--rank", "4", "--num_frames", "2"),
}
"""Family -> options of its script. SD3 is trained whole; it saves as diffusers' examples do, on
rank 0 alone, and has text encoders of transformers, which zero3 must leave whole."""
ADDED = ("fsdp2+checkpoint",)
CASES = {f"{family} {engine}": (family, engine) for family in OPTIONS for engine in ENGINES} | {
    f"flux {recipe}": ("flux", recipe) for recipe in ADDED
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> OnDemand:
    folder: Path = script_rows.pictures_and(tmp_path_factory.mktemp("families"), *OPTIONS)

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

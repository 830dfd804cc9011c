"""One script under the launch files of two processes: all compute what ddp does."""

from __future__ import annotations

import pytest
from conftest import OnDemand, begin

from harness.report.figures import parity
from harness.result import Status
from tests.made.script_rows import SCRIPTS, edited, measure

CLIP = 0.1
WORDS = ("--seed", "1", "--max_train_steps", "9", "--max_grad_norm", str(CLIP))
TRAIN = SCRIPTS / "train.py"
ENGINES = ("zero2", "zero3", "fsdp2")
LISTED = ("accumulate(model)", "accumulate([model])")
CASES = {
    **{name: (name, (), ()) for name in ("ddp", *ENGINES)},
    "checkpoint": ("fsdp2+checkpoint", (), ()),
    "adam8bit": ("ddp+adam8bit", (), ("--width", "64")),
    "unclipped": ("zero2", (), ()),
    "clipped unasked": ("ddp", (), ("--max_grad_norm", "100")),
    "list": ("ddp", (LISTED,), ("--gradient_accumulation_steps", "2")),
}
"""Row -> its recipe, edits of the script, and further words."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> OnDemand:
    folder = tmp_path_factory.mktemp("engines")

    def run(name: str):
        recipe, edits, words = CASES[name]
        script = edited(folder / name, *edits) if edits else TRAIN
        clip = None if name == "unclipped" else CLIP
        return measure(begin, recipe, folder / name, script, (*WORDS, *words), clip=clip)

    return OnDemand(run)


@pytest.fixture
def row(request, rows):
    found = rows[request.param]
    assert found.status is Status.OK, f"{found.reason}\n{found.log_tail}"
    return found


@pytest.mark.parametrize("row", [*ENGINES, "checkpoint"], indirect=True)
def test_an_engine_computes_what_ddp_computes(row, rows):
    far = parity.distances(row, rows["ddp"])
    assert far["loss"] < parity.FLOAT32.loss and far["norm"] < parity.FLOAT32.norm
    assert len(row.losses) == len(rows["ddp"].losses)


@pytest.mark.parametrize("row", ["ddp", *ENGINES], indirect=True)
def test_all_ranks_trained_together(row):
    assert [rank.rank for rank in row.ranks] == [0, 1] and row.spec.global_batch == 4
    assert all(check.ok for check in row.audit)


@pytest.mark.parametrize("row", ["zero3", "fsdp2"], indirect=True)
def test_each_rank_holds_a_shard(row, rows):
    whole, shard = (r.ranks[0].categories for r in (rows["ddp"], row))
    assert shard.optimizer_state < 0.8 * whole.optimizer_state  # zero3 has a copy of the weights
    assert row.evidence["script"]["parameters"] == rows["ddp"].evidence["script"]["parameters"]


@pytest.mark.parametrize("row", ["checkpoint"], indirect=True)
def test_an_added_checkpoint_recomputes_every_block(row, rows):
    facts = row.evidence["checkpoint"]
    assert facts["blocks_recomputed"] == facts["blocks"] == 3
    ours, theirs = (r.ranks[0].categories for r in (row, rows["fsdp2"]))
    assert ours.activations < theirs.activations


@pytest.mark.parametrize("row", ["adam8bit"], indirect=True)
def test_an_added_optimizer_steps_in_the_place_of_the_scripts(row, rows):
    ours, theirs = (r.evidence["script"]["optimizers"] for r in (row, rows["ddp"]))
    assert theirs == ["AdamW"] != ours
    assert row.evidence["adam8bit"]["moment_bytes_per_element"] < 2.4
    found = row.ranks[0].categories
    assert found.optimizer_state < 1.2 * found.parameters  # whole moments are twice as large


def test_clipping_counts_here(rows):
    """Else the next test and the parity of norms would say nothing."""
    assert all(norm > CLIP for norm in rows["ddp"].grad_norms)
    apart = parity.distances(rows["clipped unasked"], rows["ddp"])
    assert apart["loss"] > 10 * parity.FLOAT32.loss


def test_a_file_that_switches_clipping_off_makes_a_row_void(rows):
    row = rows["unclipped"]
    assert row.status is Status.VOID and "clip" in row.reason


def test_a_list_in_accumulate_is_told_of(rows):
    row = rows["list"]
    assert row.status is Status.OK, row.reason
    assert row.accumulation == 2
    assert any("list" in note for note in row.meter_notes)

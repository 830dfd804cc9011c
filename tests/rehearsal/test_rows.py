"""Rows trained on rehearsed cards by ``./run.sh run``: real values, torch's own caching allocator,
ProcessGroupNCCL, FSDP2 and DeepSpeed. Predictions are held to that allocator.

Their seconds say nothing, and no reader takes them for measurements. ``HEADROOM_REHEARSAL_ROWS``
names a folder that keeps the rows, so that the tests may run in parts.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from harness import cli
from harness.launch.command import free_port
from harness.result import REHEARSED
from tests.rehearsal import build
from tests.rehearsal.buckets import PAUSES, TRAININGS
from tests.rehearsal.rows import BATCH, MIB, MISSES, SMALL, every, rehearsed

pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(bool(build.absent()), reason=build.absent() or "it is there"),
]
each_row = pytest.mark.parametrize("key", every())


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Name -> row."""
    kept = os.environ.get("HEADROOM_REHEARSAL_ROWS")
    return rehearsed(Path(kept).resolve() if kept else tmp_path_factory.mktemp("rows"))


def predicted(row):
    if row.prediction.allocated is None:
        pytest.skip(row.prediction.reason)
    return row


@each_row
def test_a_row_trains_and_carries_its_mark(key, rows):
    result = rows[key].result
    assert result["status"] == "ok", result["reason"] + result["log_tail"]
    assert result["environment"]["device"] == REHEARSED
    assert {rank["device"] for rank in result["ranks"]} == {REHEARSED}
    assert all(loss == loss for loss in result["losses"]), "a loss is no number"


@each_row
def test_the_predicted_peak_is_the_allocator_s(key, rows):
    row = predicted(rows[key])
    assert abs(row.off) <= 0.005, (row.prediction.allocated / MIB, row.highest("allocated") / MIB)


@each_row
def test_the_predicted_reserve_is_the_allocator_s(key, rows):
    row = predicted(rows[key])
    if key in MISSES:
        pytest.xfail(MISSES[key])
    measured = row.highest("reserved")
    told = (row.prediction.reserved / MIB, measured / MIB)
    assert abs(row.off_reserved) <= max(0.02 * measured, 2 * MIB), told


def test_enough_rows_are_held_to_the_allocator(rows):
    found = [row for row in rows.values() if row.prediction.allocated is not None]
    assert len(found) >= 70


def test_ranks_agree_on_the_loss_of_one_process(rows):
    """Real values: replicas and shards of a batch train as one process does."""
    alone = rows["1 single"].result["losses"]
    for recipe in ("ddp", "zero1", "zero2", "zero3", "fsdp2"):
        assert rows[f"2 {recipe}"].result["losses"] == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(("gpus", "recipe"), [(1, "single+bf16"), (2, "zero2+bf16"), (4, "fsdp2")])
def test_plan_s_answer_is_the_allocator_s(gpus, recipe, rows, tmp_path):
    """As a person asks, with no GPU there."""
    words = ["--model", SMALL["model"], "--global-batch", str(BATCH), "--gpus", str(gpus)]
    words += ["--json", str(tmp_path / "plan.json")]
    assert cli.main(["plan", "--gpu", "H100-80GB", "--recipes", recipe, *words]) == 0
    (found,) = json.loads((tmp_path / "plan.json").read_text())["rows"]
    row = rows[f"{gpus} {recipe}"]
    assert found["prediction"]["allocated"] == pytest.approx(row.highest("allocated"), rel=0.005)
    assert found["prediction"]["reserved"] == pytest.approx(row.highest("reserved"), abs=2 * MIB)


def test_old_buckets_of_ddp_last_until_nccl_has_looked(tmp_path):
    """Either none of them is left in the second step, or all; after a pause, none."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = {**os.environ, **build.environment([build.H100] * 2, tmp_path), **shared}
    line = [str(build.python()), "-m", "tests.rehearsal.buckets"]
    ranks = [
        subprocess.Popen(line, env={**env, "RANK": r, "LOCAL_RANK": r}, stdout=subprocess.PIPE)
        for r in "01"
    ]
    for rank in ranks:
        seen = json.loads(rank.communicate()[0])
        left = {pause: [round(share, 2) for share in seen[str(pause)]] for pause in PAUSES}
        assert all(len(shares) == TRAININGS for shares in left.values())
        assert set().union(*left.values()) <= {0.0, 1.0}, left
        assert not any(left[PAUSES[-1]]), left

"""Rows as steps of a Slurm job, with ranks that only step, and every way in which Slurm ends one.

By hand, as root, two minutes, of which one is Slurm's shortest time limit:
./run.sh test -n 1 -m slurm tests/nodes/test_slurm_steps.py
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import ROOT
from harness.nodes import job as jobs
from harness.nodes import slurm
from tests.made.slurm_cluster import slurm_cluster, why_not

WHY_NOT = why_not()
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster() as made:
        yield made


@pytest.fixture(autouse=True)
def at_the_login_node(cluster, monkeypatch):
    """Slurm's commands run on the first node's network."""
    run, own = jobs.subprocess.run, {"squeue", "scontrol", "sacct", "scancel", "sbatch"}

    def inside(words, **more):
        return run(cluster.command(*words) if words[0] in own else words, **more)

    monkeypatch.setattr(jobs.subprocess, "run", inside)
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.env[name])


class Submitted:
    """A job that leads one row, followed from here."""

    def __init__(self, out: Path, *directives: str, steps: str = "") -> None:
        self.out, self.said = out, []
        words = [sys.executable, "-m", "tests.children.led", str(out), *steps.split()]
        text = slurm.script(
            slurm.Site(directives), words, name="led", nodes=2, time=None, folder=out,
            where=ROOT, exports={"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self.job = jobs.submit(text, out)
        self.thread = threading.Thread(
            target=self.job.follow, args=(self.said.append, lambda text: None)
        )
        self.thread.start()

    def stepping(self) -> bool:
        try:
            beats = [
                json.loads((self.out / "launch" / f"node{rank}.beat.json").read_text())
                for rank in (0, 1)
            ]
            return all(beat["statuses"][0]["step"] > 3 for beat in beats)
        except (OSError, ValueError, KeyError, IndexError):
            return False

    def until(self, holds: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            said = self.job.output.read_text() if self.job.output.exists() else ""
            assert time.monotonic() < deadline, (self.said, said)
            time.sleep(0.2)

    def outcome(self, seconds: float = 60) -> dict:
        """How the row ended, once the job is over."""
        self.thread.join(seconds)
        assert not self.thread.is_alive()
        self.until((self.out / "outcome.json").exists, 5)
        return json.loads((self.out / "outcome.json").read_text())


def test_a_row_is_a_step_on_both_nodes(cluster, tmp_path):
    row = Submitted(tmp_path, steps="40").outcome()
    assert row["hosts"] == ["n1", "n2"] and row["ends"] == [0, 0]


def test_cancelled_and_found_meanwhile(cluster, tmp_path):
    row = Submitted(tmp_path)
    row.until(row.stepping, 40)
    assert jobs.Job.of(tmp_path).number == row.job.number
    row.job.cancel()
    told = row.outcome()
    assert told["status"] == "interrupted" and "cancelled in phase measure" in told["reason"]
    assert row.job.ended().word == "CANCELLED" and jobs.Job.of(tmp_path) is None
    row.until(lambda: not [line for line in cluster.nodes.left() if "children" in line], 20)


def test_preempted(cluster, tmp_path):
    row = Submitted(tmp_path)
    row.until(row.stepping, 40)
    more = ["-p", "first", "-N2", "--exclusive", "--wrap", "sleep 1", "-o", "/dev/null"]
    cluster.ask("sbatch", *more)
    told = row.outcome()
    assert told["status"] == "interrupted" and "preempted in phase measure" in told["reason"]
    assert row.job.ended().word == "PREEMPTED"


def test_the_time_limit(cluster, tmp_path):
    row = Submitted(tmp_path, "#SBATCH --time=1")
    told = row.outcome(150)
    assert told["status"] == "interrupted", told
    assert "the job's time limit ended it in phase measure" in told["reason"]


def test_never(cluster, tmp_path):
    text = slurm.script(
        slurm.Site(), ["true"], name="led", nodes=5, time=None, folder=tmp_path,
        where=ROOT, exports={},
    )  # fmt: skip
    job = jobs.submit(text, tmp_path)
    with pytest.raises(jobs.JobError, match="can never start: PartitionConfig; cancelled"):
        job.follow(print, print)
    assert jobs.Job.of(tmp_path) is None and os.path.exists(tmp_path / "suite.sbatch")


def test_a_link_that_is_cut(cluster, tmp_path):
    """Before Slurm notices: the supervisors end the row, and the step with it."""
    row = Submitted(tmp_path)
    row.until(row.stepping, 40)
    cluster.nodes.link(up=False)
    row.until((tmp_path / "outcome.json").exists, 45)
    cluster.nodes.link(up=True)
    told = row.outcome(90)
    assert told["status"] == "node_lost", told
    assert "n2" in told["reason"] and "stopped answering in phase measure, step" in told["reason"]
    row.until(lambda: cluster.ask("sinfo", "-h", "-o", "%T", "-p", "main").split() == ["idle"], 60)


def test_a_node_that_is_switched_off(cluster, tmp_path):
    """Last: the cluster has lost it."""
    row = Submitted(tmp_path)
    row.until(row.stepping, 40)
    cluster.nodes.power_off(cluster.slurmd[1])
    told = row.outcome(90)
    assert told["status"] == "node_lost", told
    assert "n2" in told["reason"] and "stopped answering in phase measure, step" in told["reason"]

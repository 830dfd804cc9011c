"""A suite as one Slurm job on two nodes, and every way in which a scheduler ends one.

By hand, as root, with Debian's packages (apt-get install --no-install-recommends slurm-wlm munge),
some ten minutes on two cores: ./run.sh test -n 1 -m slurm
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import ROOT
from harness.result import Result, Status, load_all
from tests.made.slurm_cluster import Cluster, slurm_cluster, why_not
from tests.made.two_nodes import stepping, wait

WHY_NOT = why_not()
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster() as made:
        yield made


def words(out: Path, recipe: str = "ddp", steps: int = 4000, *more: str) -> list[str]:
    line = (
        f"run --nodes 2 --recipes {recipe} --model DiT-T/4 --global-batch 8 --processes 2 "
        f"--warmup 1 --steps {steps} --device cpu --noise-floor 1 --no-predictions --silence 12 "
        "--on slurm --out"
    )
    return [*line.split(), str(out), *more]


def submitted(cluster: Cluster, out: Path, line: list[str]) -> str:
    """The number of the job of a command at the login node."""
    out.mkdir(exist_ok=True)
    done = at_login(cluster, line)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.search(r"job (\d+): ", done.stdout)[1]


def at_login(cluster: Cluster, line: list[str]) -> subprocess.CompletedProcess:
    words = cluster.command(sys.executable, "-m", "harness", *line)
    return subprocess.run(words, cwd=ROOT, env=cluster.env, capture_output=True, text=True)


def measuring(cluster: Cluster, out: Path, *more: str) -> str:
    """The job of a suite with its row in its timed steps."""
    number = submitted(cluster, out, words(out, "ddp", 4000, *more))
    wait(lambda: stepping(out), 240, say=lambda: said(out))
    return number


def said(out: Path) -> str:
    return "\n".join(path.read_text() for path in out.glob("slurm-*.txt"))


def ended(cluster: Cluster, out: Path, seconds: float = 120) -> Result:
    """The row, once no job and no process of it is left."""
    wait(lambda: not cluster.ask("squeue", "-h").strip(), seconds, say=lambda: said(out))
    wait(lambda: not [line for line in cluster.nodes.left() if "harness" in line], 30)
    ((row,), skipped) = load_all(out)
    assert not skipped
    return row


def test_a_suite_of_four_rows_runs_on_both_nodes(cluster, tmp_path):
    """That they compute what one machine does: test_namespaces.py."""
    line = "run --suite smoke --device cpu --no-predictions --out"
    submitted(cluster, tmp_path, [*line.split(), str(tmp_path), "--nodes", "2", "--on", "slurm"])
    wait(lambda: not cluster.ask("squeue", "-h").strip(), 400, say=lambda: said(tmp_path))
    rows, _ = load_all(tmp_path)
    assert [row.status for row in rows] == [Status.OK] * 4, said(tmp_path)
    assert {tuple(node.host for node in row.nodes) for row in rows} == {("n1", "n2")}
    assert "4 measured" in said(tmp_path)


def test_the_time_limit(cluster, tmp_path):
    """A job of one minute; Slurm's least. The row says so, and is no failure of the recipe."""
    submitted(cluster, tmp_path, [*words(tmp_path), "--time", "1"])
    row = ended(cluster, tmp_path, 180)
    assert row.status is Status.INTERRUPTED, row.reason
    assert row.reason.endswith("by Slurm: time limit"), row.reason


def test_a_job_that_is_cancelled(cluster, tmp_path):
    cluster.ask("scancel", measuring(cluster, tmp_path))
    row = ended(cluster, tmp_path)
    assert row.status is Status.INTERRUPTED and row.reason.endswith("by Slurm: cancelled")


def test_a_job_that_is_preempted(cluster, tmp_path):
    measuring(cluster, tmp_path)
    other = ["-p", "first", "-N2", "--exclusive", "--wrap", "sleep 1", "-o", "/dev/null"]
    cluster.ask("sbatch", *other)
    row = ended(cluster, tmp_path)
    assert row.status is Status.INTERRUPTED and row.reason.endswith("by Slurm: preemption")


def test_a_job_that_is_refused(cluster, tmp_path):
    done = at_login(cluster, [*words(tmp_path), "--time", "soon"])
    assert done.returncode == 2 and "sbatch refused" in done.stderr, done.stderr


def test_srun_may_start_the_command_on_every_node(cluster, tmp_path):
    """Without a job's script: one command a node, as dstack and SkyPilot start it."""
    line = [w for w in words(tmp_path, "ddp", 3) if w not in ("--on", "slurm")]
    start = ["srun", "-N2", "--ntasks-per-node=1", "--exclusive", "--export=ALL"]
    done = subprocess.run(
        cluster.command(*start, sys.executable, "-m", "harness", *line),
        cwd=ROOT, env=cluster.env, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ((row,), _) = load_all(tmp_path)
    assert row.status is Status.OK and [node.host for node in row.nodes] == ["n1", "n2"]


def test_a_link_that_is_cut(cluster, tmp_path):
    """Before Slurm notices: the supervisors end the row, and the job with it."""
    measuring(cluster, tmp_path)
    cluster.nodes.link(up=False)
    (folder,) = tmp_path.glob("runs/*")
    wait((folder / "result.json").exists, 75, say=lambda: said(tmp_path))
    cluster.nodes.link(up=True)
    row = ended(cluster, tmp_path)
    assert row.status is Status.NODE_LOST, row.reason
    assert "n2" in row.reason and "stopped answering in phase measure, step" in row.reason
    idle = ["sinfo", "-h", "-o", "%T", "-p", "main"]
    wait(lambda: cluster.ask(*idle).split() == ["idle"], 60)


def test_a_node_that_dies(cluster, tmp_path):
    """Last: the cluster has lost it."""
    measuring(cluster, tmp_path)
    cluster.nodes.power_off(cluster.slurmd[1])
    row = ended(cluster, tmp_path)
    assert row.status is Status.NODE_LOST, row.reason
    assert "n2" in row.reason and "phase measure, step" in row.reason
    assert [node.answered for node in row.nodes] == [True, False]

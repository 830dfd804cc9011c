"""A suite as one Slurm job on two nodes, and every way in which a scheduler ends one.

By hand, as root, with Debian's packages (apt-get install --no-install-recommends slurm-wlm munge),
some ten minutes on two cores: ./run.sh test -n 1 -m slurm
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import ROOT
from harness.result import Result, Status, load_all
from tests.made.slurm_cluster import Cluster, slurm_cluster, why_not

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


def wait(until: Callable[[], object], seconds: float, say: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, f"waited in vain: {say()}"
        time.sleep(0.3)


def stepping(out: Path) -> bool:
    """Whether both nodes' ranks take timed steps."""
    phases = []
    for path in out.glob("runs/*/launch-*/node?.beat.json"):
        try:
            phases += [(s["phase"], s["step"]) for s in json.loads(path.read_text())["statuses"]]
        except (OSError, ValueError, KeyError):
            continue
    return len(phases) == 2 and all(phase == "measure" and step > 2 for phase, step in phases)


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
    wait(lambda: stepping(out), 240, lambda: said(out))
    return number


def said(out: Path) -> str:
    return "\n".join(path.read_text() for path in out.glob("slurm-*.txt"))


def ended(cluster: Cluster, out: Path, seconds: float = 120) -> Result:
    """The row, once no job and no process of it is left."""
    wait(lambda: not cluster.ask("squeue", "-h").strip(), seconds, lambda: said(out))
    wait(lambda: not [line for line in cluster.nodes.left() if "harness" in line], 30)
    ((row,), skipped) = load_all(out)
    assert not skipped
    return row


def test_a_suite_of_four_rows_reports_as_on_one_machine(cluster, tmp_path):
    out, one = tmp_path / "two", tmp_path / "one"
    line = "run --suite smoke --device cpu --no-predictions --out"
    submitted(cluster, out, [*line.split(), str(out), "--nodes", "2", "--on", "slurm"])
    wait(lambda: not cluster.ask("squeue", "-h").strip(), 400, lambda: said(out))
    subprocess.run([sys.executable, "-m", "harness", *line.split(), str(one)], cwd=ROOT, check=True)
    two_rows, one_rows = ({r.spec.recipe: r for r in load_all(p)[0]} for p in (out, one))
    assert len(two_rows) == 4 and two_rows.keys() == one_rows.keys(), said(out)
    for recipe, row in two_rows.items():
        there = one_rows[recipe]
        assert row.status is there.status is Status.OK, row.reason
        assert row.losses == there.losses and row.grad_norms == there.grad_norms, recipe
        assert [r.categories for r in row.ranks] == [r.categories for r in there.ranks]
        assert [node.host for node in row.nodes] == ["n1", "n2"]
    assert "4 measured" in said(out)


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
    wait((folder / "result.json").exists, 75, lambda: said(tmp_path))
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

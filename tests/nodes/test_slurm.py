"""A suite as one Slurm job on two nodes, and every way in which a scheduler ends one.

By hand, as root, with Debian's packages (apt-get install --no-install-recommends slurm-wlm munge),
some ten minutes on two cores: ./run.sh test -n 1 -m slurm
"""

from __future__ import annotations

import json
import signal
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


def measuring(cluster: Cluster, out: Path, *more: str) -> tuple[subprocess.Popen, str]:
    """A submitted suite with its row in its timed steps, and the job's number."""
    out.mkdir(exist_ok=True)
    client = cluster.harness(words(out, "ddp", 4000, *more), out / "said.txt")
    wait(lambda: stepping(out), 240, lambda: said(out))
    return client, cluster.job(out)


def said(out: Path) -> str:
    return (out / "said.txt").read_text()


def ended(cluster: Cluster, out: Path, client: subprocess.Popen, seconds: float = 120) -> Result:
    """The row, once the client has come back; no job and no process of it is left."""
    client.wait(seconds)
    wait(lambda: not cluster.ask("squeue", "-h").strip(), 30)
    wait(lambda: not [line for line in cluster.nodes.left() if "harness" in line], 30)
    ((row,), skipped) = load_all(out)
    assert not skipped
    return row


def test_a_suite_of_four_rows_reports_as_on_one_machine(cluster, tmp_path):
    out, one = tmp_path / "two", tmp_path / "one"
    out.mkdir()
    line = "run --suite smoke --device cpu --no-predictions --out"
    client = cluster.harness([*line.split(), str(out), "--nodes", "2", "--on", "slurm"],
                             out / "said.txt")  # fmt: skip
    assert client.wait(400) == 0, said(out)
    subprocess.run([sys.executable, "-m", "harness", *line.split(), str(one)], cwd=ROOT, check=True)
    two_rows, one_rows = ({r.spec.recipe: r for r in load_all(p)[0]} for p in (out, one))
    assert len(two_rows) == 4 and two_rows.keys() == one_rows.keys()
    for recipe, row in two_rows.items():
        there = one_rows[recipe]
        assert row.status is there.status is Status.OK, row.reason
        assert row.losses == there.losses and row.grad_norms == there.grad_norms, recipe
        assert [r.categories for r in row.ranks] == [r.categories for r in there.ranks]
        assert [node.host for node in row.nodes] == ["n1", "n2"]
    assert "4 measured" in said(out) and "job 1" in said(out)


def test_the_time_limit(cluster, tmp_path):
    """A job of one minute; Slurm's least. The row says so, and is no failure of the recipe."""
    client, _ = measuring(cluster, tmp_path, "--time", "1")
    row = ended(cluster, tmp_path, client, 180)
    assert row.status is Status.INTERRUPTED and "time limit ended it" in row.reason, row.reason


def test_a_job_that_is_cancelled(cluster, tmp_path):
    client, number = measuring(cluster, tmp_path)
    cluster.ask("scancel", number)
    row = ended(cluster, tmp_path, client)
    assert row.status is Status.INTERRUPTED, row.reason
    assert "ended as CANCELLED" in said(tmp_path)


def test_a_job_that_is_preempted(cluster, tmp_path):
    client, _ = measuring(cluster, tmp_path)
    other = ["-p", "first", "-N2", "--exclusive", "--wrap", "sleep 1", "-o", "/dev/null"]
    cluster.ask("sbatch", *other)
    row = ended(cluster, tmp_path, client)
    assert row.status is Status.INTERRUPTED and "preempted" in row.reason.lower(), row.reason
    assert "ended as PREEMPTED" in said(tmp_path)


def test_a_job_left_and_found_again(cluster, tmp_path):
    client, number = measuring(cluster, tmp_path)
    client.send_signal(signal.SIGINT)
    assert client.wait(20) == 130 and f"job {number} goes on" in said(tmp_path)
    assert "RUNNING" in cluster.ask("squeue", "-h", "-o", "%T")
    again = cluster.harness(words(tmp_path), tmp_path / "said.txt")
    wait(lambda: f"job {number} runs for" in said(tmp_path), 20, lambda: said(tmp_path))
    assert again.poll() is None
    cluster.ask("scancel", number)
    assert ended(cluster, tmp_path, again).status is Status.INTERRUPTED


def test_a_job_that_can_never_start(cluster, tmp_path):
    line = [w if w != "2" or i != 2 else "5" for i, w in enumerate(words(tmp_path))]
    line[line.index("--processes") + 1] = "5"
    client = cluster.harness(line, tmp_path / "said.txt")
    assert client.wait(60) == 2 and "can never start" in said(tmp_path), said(tmp_path)
    assert not cluster.ask("squeue", "-h").strip()


def test_srun_may_start_the_command_on_every_node(cluster, tmp_path):
    """Without a job of ours: one command a node, as dstack and SkyPilot start it."""
    line = [w for w in words(tmp_path, "ddp", 3) if w not in ("--on", "slurm")]
    start = ["srun", "-N2", "--ntasks-per-node=1", "--exclusive", "--export=ALL"]
    done = subprocess.run(
        cluster.command(*start, sys.executable, "-m", "harness", *line),
        cwd=ROOT, env=cluster.env, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ((row,), _) = load_all(tmp_path)
    assert row.status is Status.OK and [node.host for node in row.nodes] == ["n1", "n2"]


def test_a_node_that_dies(cluster, tmp_path):
    """Last: the cluster has lost it."""
    client, _ = measuring(cluster, tmp_path)
    cluster.nodes.power_off(cluster.slurmd[1])
    row = ended(cluster, tmp_path, client)
    assert row.status is Status.NODE_LOST, row.reason
    assert "n2" in row.reason and "phase measure, step" in row.reason
    assert [node.answered for node in row.nodes] == [True, False]

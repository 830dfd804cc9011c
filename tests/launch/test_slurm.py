"""A suite under Slurm: one ``srun`` line, and ways in which a scheduler ends it.

As root, with Debian's packages (apt-get install --no-install-recommends slurm-wlm munge):
./run.sh test -n 1 -m slurm
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from harness import ROOT
from harness.result import Status, load_all
from tests.made.living import until
from tests.made.slurm_cluster import Cluster, slurm_cluster, why_not
from tests.made.two_nodes import steps

WHY_NOT = why_not()
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster() as made:
        yield made


def line(out: Path, steps: int) -> str:
    """The page's line, with this cluster's address: its host names do not resolve."""
    page = (ROOT / "docs" / "how-to" / "cluster.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^srun (?:.*\\\n)*.*$", page, re.MULTILINE)
    assert "--rdzv-endpoint $(scontrol show hostnames | head -n 1):29500" in found
    found = found.replace("$(scontrol show hostnames | head -n 1)", "10.77.0.1")
    found = re.sub(r"--recipes .*", "", found.replace("\\\n", " "))
    return f"{found} --recipes ddp --model DiT-T/4 --global-batch 8 --processes 2 --warmup 1 " + (
        f"--steps {steps} --device cpu --noise-floor 1 --no-predictions --timeout 120 --out {out}"
    )


def submitted(cluster: Cluster, out: Path, *options: str) -> str:
    """The number of a job whose row is in its timed steps."""
    script = out / "job.sh"
    script.write_text(f"#!/bin/bash\ncd {ROOT}\n{line(out, 4000)}\n")
    words = ["sbatch", "--parsable", "-N2", "--ntasks-per-node=1", *options]
    number = cluster.ask(*words, "-o", str(out / "said.txt"), str(script)).strip()
    until(lambda: steps(out), say=lambda: (out / "said.txt").read_text())
    return number


def idle(cluster: Cluster) -> bool:
    left = [one for one in cluster.nodes.left() if "harness" in one]
    return not cluster.ask("squeue", "-h").strip() and not left


def test_the_pages_line_runs_on_both_nodes(cluster, tmp_path):
    words = ["salloc", "-N2", "--ntasks-per-node=1", "bash", "-c", line(tmp_path, 3)]
    done = subprocess.run(
        cluster.command(*words), cwd=ROOT, env=cluster.env, capture_output=True, text=True,
        timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for folder in (tmp_path, tmp_path / "node-1"):
        ((row,), _) = load_all(folder)
        assert row.status is Status.OK and row.spec.nodes == 2, row.reason


@pytest.mark.parametrize("ending", ["cancelled", "at its time limit"])
def test_a_job_that_is_ended_leaves_an_interrupted_row(cluster, tmp_path, ending):
    limit = ["--time", "1"] if ending == "at its time limit" else []
    number = submitted(cluster, tmp_path, *limit)
    if not limit:
        cluster.ask("scancel", number)
    until(lambda: idle(cluster), 180)
    ((row,), _) = load_all(tmp_path)
    assert row.status in (Status.INTERRUPTED, Status.NODE_LOST), row.reason

"""Slurm as text: the script of a suite, and the reason for a job's end. No processes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from harness.cluster import commands, slurm
from strategies.base import BadInput

SITE = """#!/bin/bash
# our site
#SBATCH --partition=gpu
#SBATCH --gres=gpu:8
#SBATCH --time=2:00:00

module load cuda/12.8
export HEADROOM_SCRATCH=/local
"""


def written(tmp_path: Path, site: str = SITE, **more) -> str:
    path = tmp_path / "lab"
    path.write_text(site)
    given = {"name": "headroom-default", "nodes": 2, "time": None, "folder": Path("/out")}
    given |= {"where": Path("/home/me"), "exports": {"HEADROOM_PYTHON": "/opt/my python"}}
    words = ["/repo/run.sh", "run", "--nodes", "2", "--recipes", "ddp", "--out", "/out"]
    return slurm.script(slurm.read_site(path), words, **{**given, **more})


def test_the_script_of_a_suite(tmp_path):
    assert written(tmp_path).splitlines() == [
        "#!/bin/bash",
        "# headroom-default: one job for all rows. Results: /out",
        "#SBATCH --job-name=headroom-default",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        "#SBATCH --no-requeue",
        "#SBATCH --output=/out/slurm-%j.txt",
        "#SBATCH --partition=gpu",
        "#SBATCH --gres=gpu:8",
        "#SBATCH --time=2:00:00",
        "",
        "# our site",
        "module load cuda/12.8",
        "export HEADROOM_SCRATCH=/local",
        "export HEADROOM_PYTHON='/opt/my python'",
        "cd /home/me",
        "exec /repo/run.sh run --nodes 2 --recipes ddp --out /out",
    ]


@pytest.mark.parametrize("line", ["--nodes=4", "-N 4", "--array=0-3", "--requeue", "-o x.txt"])
def test_a_site_does_not_set_what_is_the_runs_own(tmp_path, line):
    with pytest.raises(BadInput, match=r"leave it out; run sets"):
        written(tmp_path, f"#SBATCH {line}\n")


def test_a_job_starts_the_command_on_each_node():
    words = slurm.srun(2, {"SLURM_CPUS_ON_NODE": "8"})
    assert words[0] == "srun" and {"--nodes=2", "--ntasks=2", "--export=ALL"} < set(words)
    assert {"--cpus-per-task=8", "--kill-on-bad-exit=1"} < set(words)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("slurmstepd: error: *** STEP 9.0 ON n1 CANCELLED AT 2026-07-29T11:42:13 DUE TO TIME LIMIT "
         "***", "time limit"),
        ("slurmstepd: error: *** STEP 4.1 ON n1 CANCELLED AT 2026-07-29T11:42:13 DUE TO NODE "
         "FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***", "node failure"),
        ("slurmstepd: error: *** STEP 4.1 ON n1 CANCELLED AT 2026-07-29T11:42:13 DUE TO NODE "
         "FAILURE ***\nsrun: error: Node failure on n2", "node failure on n2"),
        ("slurmstepd: error: *** JOB 3 ON n1 CANCELLED AT 2026-07-29T11:42:13 DUE TO PREEMPTION "
         "***", "preemption"),
        ("slurmstepd: error: *** STEP 3.0 ON n1 CANCELLED AT 2026-07-29T11:42:13 ***", "cancelled"),
        ("srun: error: n2: task 1: Exited with exit code 1", ""),
    ],
)  # fmt: skip
def test_the_reason_for_a_jobs_end_is_in_its_output(tmp_path, text, reason):
    """Lines as Slurm 22.05 printed them."""
    (tmp_path / "slurm-7.txt").write_text(f"srun: job 7 queued\n{text}\nmore\n")
    assert slurm.ended_by({"SLURM_JOB_ID": "7"}, tmp_path) == reason
    assert slurm.ended_by({}, tmp_path) == ""


def test_the_job_gets_what_was_typed_and_not_what_is_the_submissions(tmp_path):
    from harness.cli import _parser

    line = (
        f"run --nodes 2 --on slurm --site {tmp_path}/lab --time 1:00 --recipes ddp zero2 --profile "
        "--steps 3 --out x --dry-run --no-predictions --learning-rate 0.1 --silence 20"
    )
    words = commands.typed(_parser().parse_args(shlex.split(line)))
    again = vars(_parser().parse_args(["run", *words, "--out", "x"]))
    asked = vars(_parser().parse_args(shlex.split(line)))
    own = {"on", "site", "time", "dry_run", "parser", "act"}
    assert {k: v for k, v in again.items() if k not in own} == {
        k: v for k, v in asked.items() if k not in own
    }
    assert not set(words) & {"--on", "--site", "--time", "--dry-run"}

"""Slurm as text: the script of a suite, and states as its commands print them. No processes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from harness.commands import cluster
from harness.nodes import job, slurm

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
        "# headroom-default: one job, one step a row. Results: /out",
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


def test_a_time_that_is_given_is_asked_for(tmp_path):
    text = written(tmp_path, SITE.replace("#SBATCH --time=2:00:00\n", ""), time="4:00:00")
    assert "#SBATCH --time=4:00:00" in text.splitlines()


@pytest.mark.parametrize("line", ["--nodes=4", "-N 4", "--array=0-3", "--requeue", "-o x.txt"])
def test_a_site_does_not_set_what_is_the_runs_own(tmp_path, line):
    with pytest.raises(slurm.SiteError, match=r"leave it out, there is"):
        written(tmp_path, f"#SBATCH {line}\n")


def test_a_site_that_is_not_there(tmp_path):
    with pytest.raises(slurm.SiteError, match=r"unreadable.*give --site FILE"):
        slurm.read_site(tmp_path / "none")


def test_a_row_is_a_step_of_its_own():
    words = slurm.srun(2, 8)
    assert words[0] == "srun" and {"--nodes=2", "--ntasks=2", "--export=ALL"} < set(words)
    assert {"--cpus-per-task=8", "--kill-on-bad-exit=1"} < set(words)


# ---- states, in lines as Slurm 22.05 printed them ----

SRUN = {
    "slurmstepd: error: *** STEP 9.0 ON n1 CANCELLED AT 2026-07-29T11:42:13 DUE TO TIME LIMIT ***":
        ("TIMEOUT", "job", ()),
    "srun: error: Node failure on n2\nsrun: Job step aborted: Waiting up to 32 seconds":
        ("NODE_FAIL", "step", ("n2",)),
    "slurmstepd: error: *** STEP 4.1 ON n1 CANCELLED AT 2026-07-29T11:42:13 DUE TO NODE FAILURE, "
    "SEE SLURMCTLD LOG FOR DETAILS ***": ("NODE_FAIL", "step", ()),
    "slurmstepd: error: Detected 1 oom_kill event in StepId=6.0.\n"
    "srun: error: n2: task 1: Out Of Memory": ("OUT_OF_MEMORY", "step", ("n2",)),
    "slurmstepd: error: StepId=5.0 exceeded memory limit (644386816 > 209715200), being killed":
        ("OUT_OF_MEMORY", "step", ()),
    "slurmstepd: error: *** STEP 3.0 ON n1 CANCELLED AT 2026-07-29T11:42:13 DUE TO PREEMPTION ***":
        ("PREEMPTED", "step", ()),
    "slurmstepd: error: *** STEP 3.0 ON n1 CANCELLED AT 2026-07-29T11:42:13 ***":
        ("CANCELLED", "step", ()),
}  # fmt: skip


@pytest.mark.parametrize("text", SRUN)
def test_what_srun_says(text):
    word, what, nodes = SRUN[text]
    found = slurm.from_srun(f"srun: job 9 queued\n{text}\n")
    assert (found.word, found.what, found.nodes) == (word, what, nodes)


def test_a_step_that_ended_by_itself_says_nothing():
    assert slurm.from_srun("srun: error: n2: task 1: Exited with exit code 1\n") is None


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("7|COMPLETED|n[1-2]\n7.batch|COMPLETED|n1\n7.0|COMPLETED|n[1-2]\n", None),
        ("7|FAILED|n[1-2]\n7.batch|FAILED|n1\n7.0|COMPLETED|\n7.1|OUT_OF_MEMORY|n[1-2]\n",
         ("OUT_OF_MEMORY", "step")),
        ("7|NODE_FAIL|n[1-2]\n7.batch|FAILED|n1\n7.0|FAILED|n1\n", ("NODE_FAIL", "job")),
        ("7|TIMEOUT|n1\n7.batch|FAILED|n1\n", ("TIMEOUT", "job")),
        ("7|CANCELLED by 0|n1\n7.0|CANCELLED by 0|n1\n", ("CANCELLED", "step")),
        ("7|RUNNING|n1\n7.9|FAILED|n1\n7.10|PREEMPTED|n1\n", ("PREEMPTED", "step")),
        ("", None),
        ("Slurm accounting storage is disabled\n", None),
    ],
)  # fmt: skip
def test_what_sacct_says_of_the_last_step(text, state):
    found = slurm.from_sacct(text)
    assert (found and (found.word, found.what)) == state
    if found and found.word == "CANCELLED":
        assert found.by == "user 0"


def test_what_scontrol_says_of_a_job():
    text = "JobId=7 JobName=x\n   JobState=NODE_FAIL Reason=NodeDown Dependency=(null)\n"
    assert slurm.from_scontrol(text).word == "NODE_FAIL"
    assert slurm.from_scontrol(text.replace("NODE_FAIL", "COMPLETED")) is None


@pytest.mark.parametrize(
    ("state", "reason", "vain"),
    [
        ("PENDING", "PartitionConfig", True), ("PENDING", "Resources", False),
        ("PENDING", "BadConstraints", True), ("RUNNING", "PartitionConfig", False),
    ],
)  # fmt: skip
def test_a_job_that_waits_in_vain(state, reason, vain):
    assert job.never(state, reason) is vain


def test_the_job_gets_what_was_typed_and_not_what_is_the_submissions(tmp_path):
    from harness.cli import _parser

    line = (
        f"run --nodes 2 --on slurm --site {tmp_path}/lab --time 1:00 --recipes ddp zero2 --profile "
        "--steps 3 --out x --dry-run --no-predictions --learning-rate 0.1 --silence 20"
    )
    words = cluster.typed(_parser().parse_args(shlex.split(line)))
    again = vars(_parser().parse_args(["run", *words, "--out", "x"]))
    asked = vars(_parser().parse_args(shlex.split(line)))
    own = {"on", "site", "time", "dry_run", "parser", "act"}
    assert {k: v for k, v in again.items() if k not in own} == {
        k: v for k, v in asked.items() if k not in own
    }
    assert not set(words) & {"--on", "--site", "--time", "--dry-run"}

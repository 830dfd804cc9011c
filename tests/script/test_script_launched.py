"""The command as users type it: real launches by accelerate, and deadlines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import begin

from harness import ROOT, cli
from harness.result import Result, Status, load, load_all
from tests.made.script_rows import SCRIPTS, edited, rows_in_forks

pytestmark = pytest.mark.thorough

WORDS = ("--seed", "1", "--max_train_steps", "9", "--max_grad_norm", "0.1")
STEPS = ("--warmup", "1", "--steps", "1", "--device", "cpu")
SLEEPS = ("    args = parse_args()\n", "    import time\n\n    time.sleep(300)\n")
"""An edit of a script that loads for long."""


def typed(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``python -m harness script`` as a process of its own, with the script's words."""
    line = [sys.executable, "-m", "harness", "script", *STEPS[4:], "--out", str(out), *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(line, cwd=out.parent, env=env, capture_output=True, text=True)


def row_of_check(out: Path) -> Result:
    return load(out / "check" / "result.json")


def test_check_shows_what_is_recognised(tmp_path):
    script = str(SCRIPTS / "train.py")
    done = typed(tmp_path / "out", "--check", "--", script, *WORDS, "--train_batch_size", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    told = dict(line.split(None, 1) for line in done.stdout.splitlines() if " " in line.strip())
    facts = row_of_check(tmp_path / "out").evidence["script"]
    assert told["model"] == "Denoiser, 3 blocks" and told["optimizer"] == "AdamW"
    assert f"{facts['parameters']:,}" in told["parameters"] and "100.00 %" in told["parameters"]
    assert told["batch"].startswith("3,") and told["clipping"] == "0.1"
    assert not (tmp_path / "out" / "log.json").exists()


def test_a_script_that_loads_too_long_ends_by_its_deadline(tmp_path):
    script = edited(tmp_path, SLEEPS)
    limits = ("--timeout", "40", "--load-timeout", "12")
    done = typed(tmp_path / "out", "--check", *limits, "--", str(script), *WORDS)
    row = row_of_check(tmp_path / "out")
    assert done.returncode != 0 and row.status is Status.TIMEOUT
    assert "--load-timeout" in f"{row.way_out}{done.stdout}"


def test_a_pasted_command_runs(tmp_path):
    """As each row shows it: plain accelerate launch, from the repository's root."""
    script = str(SCRIPTS / "train.py")
    dry = typed(tmp_path / "out", "--dry-run", "--processes", "1", *STEPS[:4], "--", script, *WORDS)
    line = next(line for line in dry.stdout.splitlines() if "accelerate" in line)
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = (tmp_path / "out").rglob("result.json")
    assert load(found).status is Status.OK


def test_clipping_is_read_off_the_reference_and_given_to_deepspeed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = str(SCRIPTS / "train.py")
    out = ["--out", str(tmp_path / "out"), "--processes", "2", "--launch", "ddp", "zero2"]
    with rows_in_forks(begin):
        code = cli.main(["script", *STEPS, *out, "--", script, *WORDS])
    rows, _ = load_all(tmp_path / "out")
    assert code == 0 and [row.status for row in rows] == [Status.OK] * 3
    assert len({json.dumps(row.losses) for row in rows}) == 1
    assert {row.spec.recipe for row in rows} == {"ddp", "zero2"}


def test_plugins_stay_and_a_tracker_that_the_loop_uses_is_left_out_and_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*STEPS, "--processes", "2", "--out", "out", "--launch", "ddp", "zero2"]
    with rows_in_forks(begin):
        cli.main(["script", *words, "--", str(SCRIPTS / "plugins_and_tracker.py")])
    rows = load_all(tmp_path / "out")[0]
    assert {row.status for row in rows} == {Status.OK}
    assert len({json.dumps(row.losses) for row in rows}) == 1
    for row in rows:
        assert row.evidence["script"]["skipped"]["get_tracker"] >= 2
        assert "compiles" not in " ".join(row.meter_notes)

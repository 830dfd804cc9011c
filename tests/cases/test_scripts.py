"""A script as people have it runs unchanged, and engines that train alike are told alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import begin

from harness import cli
from harness.result import Status, load_all
from harness.script.row import launch_name
from tests.made.script_rows import rows_in_forks

SCRIPT = Path(__file__).parent / "scripts/plugins_and_tracker.py"


@pytest.mark.thorough
def test_plugins_stay_and_a_tracker_that_the_loop_uses_is_left_out_and_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--device", "cpu", "--processes", "2", "--warmup", "1", "--steps", "2", "--out", "out"]
    with rows_in_forks(begin):
        cli.main(["script", *words, "--launch", "ddp", "zero2", "--", str(SCRIPT)])
    rows = load_all(tmp_path / "out")[0]
    assert {row.status for row in rows} == {Status.OK}
    assert len({json.dumps(row.losses) for row in rows}) == 1
    for row in rows:
        assert row.evidence["script"]["skipped"]["get_tracker"] >= 2
        assert "compiles" not in " ".join(row.meter_notes)


@pytest.mark.parametrize("word", ["my.yaml", "./folder/my", "@my.json"])
def test_a_path_behind_launch_is_a_users_own_file(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch_name(word) == f"@{tmp_path / word.removeprefix('@')}"
    assert launch_name("zero2") == "zero2"

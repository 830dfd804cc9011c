"""Scripts as people have them run unchanged, and engines that train alike are told alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import begin

from harness import cli
from harness.result import Result, Status, load_all
from harness.script.row import launch_name
from tests.made.script_rows import rows_in_forks

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = ("--warmup", "1", "--steps", "2", "--device", "cpu")


def run(name: str, folder: Path, *words: str) -> list[Result]:
    out = ["--out", str(folder / "out")]
    with rows_in_forks(begin):
        cli.main(["script", *STEPS, *out, *words, "--", str(SCRIPTS / f"{name}.py")])
    return load_all(folder / "out")[0]


@pytest.mark.thorough
def test_a_tracker_that_the_loop_uses_is_left_out_and_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = run("tracker_in_loop", tmp_path, "--launch", "single")
    assert {row.status for row in rows} == {Status.OK}
    assert rows[0].evidence["script"]["skipped"]["get_tracker"] >= 2


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["exhausted_clip_iterator", "trainer_plugin"])
def test_engines_that_train_alike_have_equal_losses(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = run(name, tmp_path, "--processes", "2", "--launch", "ddp", "zero2")
    assert {row.status for row in rows} == {Status.OK}
    assert len({json.dumps(row.losses) for row in rows}) == 1
    notes = " ".join(note for row in rows for note in row.meter_notes)
    assert "compiles" not in notes
    assert ("got no parameters" in notes) == (name == "exhausted_clip_iterator")


@pytest.mark.parametrize("word", ["my.yaml", "./folder/my", "@my.json"])
def test_a_path_behind_launch_is_a_users_own_file(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch_name(word) == f"@{tmp_path / word.removeprefix('@')}"
    assert launch_name("zero2") == "zero2"

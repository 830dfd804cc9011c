"""Rows of the command ``script``: which ones there are, which are refused by name, and parity."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from harness import cli
from harness.result import Result, Status, load
from harness.script import measured
from harness.script.command import Starter
from harness.script.row import Script, launch_name, recipes_of, row_of
from harness.spec import SpecError
from harness.suite.run import plan
from harness.system.machine import look
from strategies import launch_file
from strategies.base import BadInput
from tests.made.results import cpu_set

FIELDS = {"processes": 2, "device": "cpu", "warmup": 1, "steps": 1, "seed": 0}


@pytest.fixture
def script(tmp_path) -> Script:
    (tmp_path / "train.py").write_text("print('trains')\n")
    return Script.of(["--", "train.py", "--size", "4"], tmp_path)


def test_each_launch_file_runs_alone_and_with_each_strategy_behind_the_reference():
    found = recipes_of(["zero2", "fsdp2"], ["checkpoint", "compile"], 2)
    assert found[0] == "ddp" and found[3:6] == ["zero2", "zero2+checkpoint", "zero2+compile"]
    assert len(found) == 9 and recipes_of(["single"], [], 1) == ["single"]
    with pytest.raises(SpecError, match="--with"):
        recipes_of(["checkpoint"], [], 1)
    with pytest.raises(BadInput, match="nonsense"):
        recipes_of(["ddp"], ["nonsense"], 2)


@pytest.mark.parametrize(("recipe", "name"), [
    ("ddp+bf16", "bf16"), ("ddp+lora", "lora"), ("ddp+block_swap", "block_swap"),
    ("ddp+checkpoint:every=2", "checkpoint"), ("zero2+cast", "cast"), ("pp", "pp"),
])  # fmt: skip
def test_what_no_script_can_have_is_refused_by_name_before_any_process(
    script, tmp_path, recipe, name
):
    (row,) = plan([row_of(script, recipe, **FIELDS)], tmp_path / "out", look(tmp_path))
    assert row.status is Status.REFUSED and row.lack.text.startswith(f"{name}: ")


def test_a_script_has_a_row_of_every_launch_file(script):
    """Nothing is known of its model before it runs."""
    for name in launch_file.names():
        assert row_of(script, name, **FIELDS | {"processes": 4}).spec.recipe == name


def test_a_row_is_another_one_once_its_script_has_changed(script):
    before = row_of(script, "ddp", **FIELDS).subject.identity
    script.path.write_text("print('trains otherwise')\n")
    assert row_of(script, "ddp", **FIELDS).subject.identity != before
    assert row_of(script, "single", **FIELDS).spec.processes == 1


@pytest.mark.parametrize("word", ["my.yaml", "./folder/my", "@my.json"])
def test_a_path_behind_launch_is_a_users_own_file(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch_name(word) == f"@{tmp_path / word.removeprefix('@')}"
    assert launch_name("zero2") == "zero2"


def test_the_command_of_a_row_can_be_pasted(script, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["script", "--launch", "zero2", "--with", "adam8bit", "--processes", "2"]
    words += ["--device", "cpu", "--clip", "0.5", "--dry-run", "--", "train.py", "--size", "4"]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5  # the reference twice
    assert all("-m harness.script.run --recipe" in line for line in lines if line[0] != "#")
    assert lines[-2].endswith(f"--folder {tmp_path} -- {tmp_path}/train.py --size 4")


# ---- one run ----


def test_a_row_that_clips_otherwise_than_the_script_runs_again(script, tmp_path, monkeypatch):
    asked = []

    def run(row, folder, **more):
        asked.append(row.clip)
        made = copy.deepcopy(cpu_set()["zero2-r0"])
        made.evidence = {"script": {"clip": 0.5}}
        if row.clip != 0.5:
            made.status = Status.VOID
            made.audit[0] = dataclasses.replace(
                made.audit[0], name="gradient clipping", asked=0.5, found=0.0, ok=False
            )
        return made

    monkeypatch.setattr("harness.script.command.launch.run", run)
    row = row_of(script, "zero2", **FIELDS)
    ended = Starter(tmp_path, 10)(row, tmp_path, timeout=10, on_status=lambda status: None)
    assert ended.status is Status.OK and asked == [None, 0.5]


@pytest.mark.parametrize(("phase", "step", "advice"), [
    ("load", 0, "--load-timeout"), ("warmup", 0, "accelerator.backward"), ("measure", 3, "--steps"),
])  # fmt: skip
def test_a_script_that_comes_to_no_step_in_time_is_told_what_to_do(
    script, tmp_path, monkeypatch, phase, step, advice
):
    row = row_of(script, "ddp", **FIELDS)
    late = Result.not_run(row, Status.TIMEOUT, "late", "fewer --steps", phase=phase, step=step)
    monkeypatch.setattr("harness.script.command.launch.run", lambda *_, **__: late)
    ended = Starter(tmp_path, 10)(row, tmp_path, timeout=10, on_status=lambda status: None)
    assert advice in ended.way_out


# ---- a loop of one's own ----


@pytest.fixture
def accelerator():
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(True)


def trained(accelerator: Accelerator, out: Path, steps: int = 30, clipped=None) -> list[float]:
    """Losses of a loop in which parameters are clipped that ``clipped`` takes from the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    given = clipped and clipped(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    losses = []
    with measured(accelerator, out, warmup=1, steps=1, name="my loop"):
        for _ in range(steps):
            loss = model(torch.randn(4, 8)).square().mean()
            accelerator.backward(loss)
            if clipped:
                accelerator.clip_grad_norm_(given, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_a_loop_is_measured_in_place(accelerator, tmp_path, capsys):
    losses = trained(accelerator, tmp_path / "row")
    path, said = capsys.readouterr().out.splitlines()[-2:]
    assert path == str(tmp_path / "row" / "result.json") and "samples/s" in said
    assert cli.main(["report", str(tmp_path / "row")]) == 0
    assert (tmp_path / "row" / "report.html").is_file()
    found = load(tmp_path / "row" / "result.json")
    assert found.status is Status.OK and found.losses == pytest.approx(losses, rel=0)
    assert found.spec.recipe == "single" and found.ranks[0].categories.parameters == 161 * 4
    assert json.loads((tmp_path / "row" / "result.json").read_text())["parameters"] == 161
    assert Accelerator.backward.__module__ == "accelerate.accelerator"


def test_a_loop_that_ends_early_says_how_many_steps_are_needed(accelerator, tmp_path):
    with pytest.raises(BadInput, match="3 optimizer steps"):
        trained(accelerator, tmp_path / "row", 3)


def test_a_clipping_iterator_that_is_empty_is_named_and_gives_no_norms(accelerator, tmp_path):
    trained(accelerator, tmp_path / "row", clipped=lambda model: iter(()))
    found = load(tmp_path / "row" / "result.json")
    assert found.status is Status.OK and not found.grad_norms
    assert any("clip_grad_norm_ got no parameters" in note for note in found.meter_notes)


def test_parameters_that_are_not_trained_are_named_where_they_are_clipped(accelerator, tmp_path):
    """As under FSDP2, which replaces the parameters in ``prepare``."""
    with pytest.raises(BadInput, match=r"make the list .* after accelerator\.prepare"):
        copied = lambda model: [*copy.deepcopy(model).parameters()]  # noqa: E731
        trained(accelerator, tmp_path / "row", clipped=copied)
    assert load(tmp_path / "row" / "result.json").status is Status.VOID

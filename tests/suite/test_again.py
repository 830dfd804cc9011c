"""The reference measured again: where in a suite, how often, and what is left of it when it ends
otherwise than well. A fake launcher stands in."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from harness.commands.progress import Progress
from harness.resolve import resolve, run_name
from harness.result import Result, Status
from harness.spec import Spec
from harness.suite import run as suite_run
from harness.suite.file import SuiteError, load_suite
from harness.suite.matrix import ad_hoc, specs
from harness.suite.rows import with_reference_again
from tests.made.machines import SUITE, FakeLaunch, machine, named


def planned(recipes: list[str], times: int, **given: object) -> list[Spec]:
    suite = ad_hoc(recipes, "cpu")
    return with_reference_again(specs(suite, given), suite.reference, times)


@pytest.mark.parametrize(
    ("others", "times", "order"),
    [
        ("", 3, "ddp"),
        ("zero2 zero3", 2, "ddp zero2 zero3 ddp1"),
        ("zero2 zero3", 3, "ddp zero2 ddp1 zero3 ddp2"),
        ("zero1 zero2 zero3 single", 4, "ddp zero1 ddp1 zero2 zero3 ddp2 single ddp3"),
    ],
)
def test_the_reference_is_measured_first_last_and_between(others, times, order):
    assert named(planned(["ddp", *others.split()], times)) == order


def test_a_repetition_is_a_run_of_its_own_that_differs_in_nothing_else():
    runs = [run for run in planned(["ddp", "zero2"], 3, steps=9) if run.recipe == "ddp"]
    assert len({run_name(run) for run in runs}) == len({run.key for run in runs}) == 3
    assert {dataclasses.replace(run, repeat=0) for run in runs} == {runs[0]}


def test_a_suite_says_how_often(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    for words, often in (("", 3), ("noise_floor: 5\n", 5), ("noise_floor: 1\n", 1)):
        file.write_text(words + SUITE)
        assert load_suite(str(file), "cpu").noise_floor == often
    file.write_text("noise_floor: 0\n" + SUITE)
    with pytest.raises(SuiteError, match="noise_floor is 0; write at least 1"):
        load_suite(str(file), "cpu")
    with pytest.raises(SuiteError, match="noise_floor is 0; give --noise-floor at least 1"):
        planned(["ddp", "zero2"], 0)


def go(out: Path, launcher: FakeLaunch, recipes: list[str], *, console=None) -> list[Result]:
    rows = [resolve(spec) for spec in planned(recipes, 3, data="synthetic")]
    here, progress = machine(out), Progress(console or Console(quiet=True))
    with mock.patch.object(suite_run.launch, "run", launcher):
        plan = suite_run.plan(rows, out, here)
        return suite_run.run_suite(
            ad_hoc(recipes, "cpu"), plan, out, machine=here, progress=progress
        )


def test_a_suite_that_was_cut_short_goes_on_with_the_repetition_it_lacks(tmp_path: Path):
    launcher = FakeLaunch()
    found = go(tmp_path, launcher, ["ddp", "zero2", "zero3"])
    assert launcher.started == ["ddp", "zero2", "ddp1", "zero3", "ddp2"]
    assert [r.spec.repeat for r in found] == [0, 0, 1, 0, 2]
    (last,) = tmp_path.glob("runs/ddp-r2-*/result.json")
    last.unlink()
    again = FakeLaunch()
    assert len(go(tmp_path, again, ["ddp", "zero2", "zero3"])) == 5
    assert again.started == ["ddp2"]


def test_a_reference_that_ended_badly_is_not_tried_again(tmp_path: Path, capsys):
    launcher = FakeLaunch(ddp=Status.GPU_OOM)
    found = go(tmp_path, launcher, ["ddp", "zero2", "zero3"], console=Console(width=100))
    assert launcher.started == ["ddp", "zero2", "zero3"]
    assert [r.spec.recipe for r in found] == ["ddp", "zero2", "zero3"]
    text = capsys.readouterr().out
    assert "[3/5] ddp (repeat 1): not run, because its first run ended as gpu_oom" in text
    assert "[5/5] ddp (repeat 2): not run" in text

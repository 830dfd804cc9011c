"""--profile and --snapshot: what is recorded, that it is not ranked, and where it cannot be."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re

import pytest
import torch
from conftest import TINY, Case, launched_together

from harness import cli
from harness.report import write_report
from harness.report.data import grouping
from harness.resolve import resolve
from harness.result import Status
from harness.spec import Spec
from harness.suite import matrix
from harness.suite.run import plan
from harness.system.machine import recall
from harness.worker import loop
from tests.made.results import cpu_set


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A profiled run, and its folder."""
    folder = tmp_path_factory.mktemp("recorded") / "runs"
    spec = dataclasses.replace(TINY, recipe="ddp", processes=2, profile=True)
    return launched_together({"one": Case(spec)}, folder)["one"], folder / "one"


def test_a_trace_of_three_steps_is_left_for_other_tools(recorded):
    row, folder = recorded
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    (name,) = row.recordings
    assert re.fullmatch(r"profile/rank0\..*\.pt\.trace\.json\.gz", name)
    with gzip.open(folder / name, "rt") as stream:
        events = json.load(stream)["traceEvents"]
    steps = [e for e in events if str(e.get("name", "")).startswith("ProfilerStep#")]
    assert len({e["name"] for e in steps}) == loop.ACTIVE
    assert any(e.get("name") == "aten::addmm" for e in events)
    assert any(e.get("name") == "[memory]" for e in events)


def test_a_recorded_run_is_shown_and_not_ranked(recorded, tmp_path):
    row, _ = recorded
    report = grouping.build([row, *cpu_set().values()], [])
    assert [r.spec for r in report.recorded] == [row.spec]
    assert not any(line.spec.recorded for group in report.groups for line in group.rows)
    for path in write_report([row], [], tmp_path):
        text = path.read_text()
        if path.suffix in (".html", ".md"):
            assert "Nothing to rank: 1 recorded (ddp)." in text
            assert "not ranked" in text and "profile/rank0." in text
        if path.suffix == ".csv":
            assert len(text.splitlines()) == 1


def test_one_flag_makes_every_row_a_recorded_one(capsys):
    suite = matrix.ad_hoc(["ddp", "single"], "cpu")
    assert all(spec.profile for spec in matrix.specs(suite, {"profile": True}))
    assert cli.main(["run", "--recipes", "ddp", "--profile", "--device", "cpu", "--dry-run"]) == 0
    line = capsys.readouterr().out
    assert " --profile " in line and "--profile True" not in line


def test_without_a_gpu_there_is_no_allocator_history(tmp_path):
    asked = resolve(Spec(recipe="single", global_batch=16, snapshot=True))
    (row,) = plan([asked], tmp_path, recall(tmp_path))
    assert row.status is Status.UNSUPPORTED
    assert "runs on the CPU" in row.lack.text and "leave --snapshot out" in row.lack.hint


def test_a_history_that_cannot_be_written_hides_no_error_and_is_one(tmp_path, monkeypatch):
    def full(path: str) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *given, **more: None)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    with pytest.raises(MemoryError), loop.allocator_history(tmp_path, 0):
        raise MemoryError
    with pytest.raises(OSError, match="No space left"), loop.allocator_history(tmp_path, 0):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_history_is_written_also_when_memory_runs_out(tmp_path):
    with pytest.raises(torch.OutOfMemoryError), loop.allocator_history(tmp_path, 0):
        torch.empty(2**50, device="cuda", dtype=torch.uint8)
    assert (tmp_path / "snapshot.rank0.pickle").stat().st_size > 0

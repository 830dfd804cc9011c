"""Rows side by side: which may, on which GPU, and that no time of theirs is anywhere."""

from __future__ import annotations

import dataclasses
import json
import threading

import pytest
from rich.console import Console

from harness.report import build
from harness.report.rendering import html, markdown, terminal
from harness.resolve import resolve
from harness.result import LaunchRecord, Status, load
from harness.spec import Spec
from harness.suite import matrix
from harness.suite.file import SuiteError
from harness.suite.rows import able, places, without_times
from harness.suite.run import plan, run_suite
from harness.system.gpus import Gpu
from tests.made.machines import machine
from tests.made.results import gpu_set

SPEC = Spec(recipe="single", model="DiT-T/4", data="synthetic", device="cuda")


@pytest.mark.parametrize(
    ("recipe", "may", "more"),
    [
        ("single+bf16", True, {}),
        ("single+bf16+checkpoint", True, {}),
        ("single+compile", False, {}),
        ("single+offload_activations", False, {}),
        ("single+ema:place=cpu", False, {}),
        ("zero2_offload", False, {}),
        ("zero3_nvme", False, {}),
        ("ddp", False, {"processes": 2}),
        ("single", False, {"device": "cpu"}),
        ("single", False, {"profile": True}),
    ],
)
def test_which_rows_may(recipe, may, more):
    assert able(resolve(dataclasses.replace(SPEC, recipe=recipe, **more))) is may


CARDS = tuple(
    Gpu(index=i, name="NVIDIA H100 80GB HBM3", total_bytes=80 << 30, uuid=f"GPU-{i}")
    for i in range(2)
)


def test_gpus_are_named_by_uuid(tmp_path):
    here = machine(tmp_path, gpus=CARDS)
    assert places(here, 2) == ["GPU-0", "GPU-1"]
    with pytest.raises(SuiteError, match="has 2 GPUs; give --side-by-side 2"):
        places(here, 3)
    with pytest.raises(SuiteError, match="at least 2"):
        places(here, 1)


class Silent:
    """A listener that hears nothing."""

    def __getattr__(self, name):
        return lambda *a, **k: None


def measured(recipes, tmp_path, start, gpus=("GPU-0", "GPU-1"), **more):
    suite = matrix.ad_hoc(recipes, "cuda")
    here = machine(tmp_path, gpus=CARDS)
    given = {"model": "DiT-T/4", "data": "synthetic", "global_batch": 8, "processes": 1}
    rows = [resolve(s) for s in matrix.specs(suite, given, gpus=1, gpu_bytes=80 << 30)]
    planned = plan(rows, tmp_path, here)
    return run_suite(
        suite, planned, tmp_path, machine=here, progress=Silent(), start=start, gpus=gpus, **more
    )


class Runner:
    """Stands for ``launch.run``: what each row was given, and how many ran at a time."""

    def __init__(self, worse: str = "", together: bool = False) -> None:
        self.given, self.running, self.most = {}, 0, 0
        self.lock, self.worse = threading.Lock(), worse
        self.two, self.together = threading.Event(), together

    def __call__(self, resolved, folder, *, timeout, on_status=None, added=None, stop=None):
        recipe = resolved.spec.recipe
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            if self.running == 2:
                self.two.set()
            self.given.setdefault(recipe, []).append(added and added["CUDA_VISIBLE_DEVICES"])
        if added and self.together:
            self.two.wait(30)  # the first row waits for the second
        with self.lock:
            self.running -= 1
        row = dataclasses.replace(gpu_set()["ddp"], spec=resolved.spec)
        if added and recipe == self.worse:
            row = dataclasses.replace(row, status=Status.HOST_OOM, ranks=[])
        row.write(folder / "result.json")
        return row


RECIPES = ["single", "single+bf16", "single+checkpoint", "single+compile"]


def test_rows_share_the_gpus_and_the_others_run_alone_and_timed(tmp_path):
    runner = Runner(together=True)
    rows = {r.spec.recipe: r for r in measured(RECIPES, tmp_path, runner)}
    assert runner.most == 2 and runner.given["single+compile"] == [None]
    used = {gpu for recipe in RECIPES[:3] for gpu in runner.given[recipe]}
    assert used == {"GPU-0", "GPU-1"}
    assert [rows[r].beside for r in RECIPES] == [2, 2, 2, 0]
    for recipe in RECIPES[:3]:
        assert not any(rank.step_seconds or rank.warmup_seconds for rank in rows[recipe].ranks)
        assert rows[recipe].ranks[0].phases
    assert all(rank.step_seconds for rank in rows["single+compile"].ranks)


def test_a_failure_in_company_is_found_again_alone(tmp_path):
    runner = Runner(worse="single+bf16")
    rows = {r.spec.recipe: r for r in measured(RECIPES, tmp_path, runner)}
    assert len(runner.given["single+bf16"]) == 2 and runner.given["single+bf16"][1] is None
    assert rows["single+bf16"].status is Status.OK and rows["single+bf16"].beside == 0


def test_memory_alone_is_kept_for_memory_and_not_for_time(tmp_path):
    measured(["single"], tmp_path, Runner())
    again = Runner()
    measured(["single"], tmp_path, again)
    assert again.given == {}
    timed = Runner()
    (row,) = measured(["single"], tmp_path, timed, gpus=())
    assert timed.given == {"single": [None]} and row.beside == 0
    (found,) = tmp_path.glob("runs/*/result.json")
    assert load(found).ranks[0].step_seconds


def test_neighbours_are_not_told_of_as_another_headroom():
    company = gpu_set()["ddp"]
    company.launch = LaunchRecord(exit_code=0, wall_seconds=9.0, tree_peak_bytes=1, others=[4711])
    assert without_times(company, 2).launch.others == []


def test_the_report_shows_their_memory_and_no_time():
    alone, company = gpu_set()["ddp"], without_times(gpu_set()["zero2-bf16"], 2)
    report = build([alone, company], [])
    assert [row.spec.recipe for group in report.groups for row in group.rows] == ["ddp"]
    assert report.memory_only == [company]
    text, page = markdown.render(report), html.render(report)
    assert "## Memory only" in text and "Memory only" in page
    table = text.split("## Memory only")[1].split("##")[0]
    assert "zero2+bf16" in table and "Samples" not in table
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    terminal.render(report, console)
    said = console.export_text()
    assert "Memory only, measured side by side, never ranked: zero2+bf16" in said
    assert "1 of memory only (zero2+bf16)" in said
    json.dumps(company.to_json())
    nothing = build([company], [])
    assert "Nothing to rank" in markdown.render(nothing)

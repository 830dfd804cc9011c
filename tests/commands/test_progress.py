"""Progress in a log file and on a terminal, with a clock of the test's own."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from harness.commands.progress import Progress
from harness.result import Result, Status
from harness.spec import Spec
from tests.made.results import ok


@pytest.fixture
def watched(request):
    """Progress on a terminal or in a log: what shows it, what it printed, and its clock."""
    out, now = io.StringIO(), [0.0]
    console = Console(file=out, width=100, force_terminal=request.param, color_system=None)
    return Progress(console, now=lambda: now[0]), out, now


@pytest.mark.parametrize("watched", [False], indirect=True)
def test_a_log_gets_a_line_an_event(watched) -> None:
    progress, out, now = watched
    progress.begin_suite("mine", ["ddp", "zero3_nvme", "zero2"], [True, False, True])
    progress.begin_run("ddp", 90)
    for _ in range(130):
        now[0] += 1
        progress.status({"phase": "measure", "step": 2, "of": 6})
    progress.end_run(ok("ddp"))
    lack = {"reason": "no libaio", "way_out": "install it"}
    progress.skip(Result(status=Status.UNSUPPORTED, spec=Spec(recipe="zero3_nvme"), **lack))
    progress.begin_run("zero2", None)
    progress.stop()
    suite, began, minute, _, ended, skipped, remedy, last = out.getvalue().splitlines()
    assert suite == "suite mine: 3 runs, 2 to do" and began.startswith("[1/3] ddp: begins")
    assert minute == "[1/3] ddp: measuring 2/6  1 min 00 s"
    assert "200.0 ms a step" in ended and "1.50 GiB" in ended and "2 min 10 s" in ended
    assert "unsupported" in skipped and "no libaio" in skipped and "install it" in remedy
    assert last == "[3/3] zero2: begins  about 2 min 10 s left"


@pytest.mark.parametrize("watched", [True], indirect=True)
def test_one_live_line_on_a_terminal(watched) -> None:
    progress, out, now = watched
    recipe = "zero3_offload+bf16+checkpoint+accumulate:steps=4+adamw:impl=foreach+ema:place=cpu"
    progress.begin_suite("mine", [recipe], [True])
    progress.begin_run(recipe, 90)
    now[0] = 65
    progress.status({"phase": "warmup", "step": 1, "of": 2})
    line = progress.line()
    assert line.plain == f"[1/1] warm-up 1/2  1 min 05 s  {recipe}" and line.no_wrap
    progress.end_run(ok(recipe))
    progress.stop()
    assert progress.live is None and "200.0 ms a step" in out.getvalue()

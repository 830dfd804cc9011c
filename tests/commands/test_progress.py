"""Progress in a log file and on a terminal, with a clock of the test's own."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from rich.console import Console

from harness.commands.progress import LiveLine, Progress
from harness.result import Result, Status
from harness.spec import Spec
from tests.made.results import ok


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def watch(
    terminal: bool, kind: Callable[..., LiveLine] = Progress
) -> tuple[Any, io.StringIO, Clock]:
    out, now = io.StringIO(), Clock()
    console = Console(file=out, width=100, force_terminal=terminal, color_system=None)
    return kind(console, now=now), out, now


def test_a_log_gets_a_line_an_event() -> None:
    progress, out, now = watch(terminal=False)
    progress.begin_suite("mine", ["ddp", "zero3_nvme", "zero2"], [True, False, True])
    progress.begin_run("ddp", 90)
    for _ in range(130):
        now.seconds += 1
        progress.status({"phase": "measure", "step": 2, "of": 6})
    progress.end_run(ok("ddp"))
    gone = Spec(recipe="zero3_nvme")
    lack = Result(status=Status.UNSUPPORTED, spec=gone, reason="no libaio", way_out="install it")
    progress.skip(lack)
    progress.begin_run("zero2", None)
    progress.stop()
    lines = out.getvalue().splitlines()
    assert lines[0] == "suite mine: 3 runs, 2 to do"
    assert lines[1] == "[1/3] ddp: begins, at most 1 min 30 s"
    assert lines[2] == "[1/3] ddp: measuring 2/6  1 min 00 s"
    assert lines[4].split() == [
        *("[1/3]", "ddp", "ok", "200.0", "ms", "a", "step", "1.50", "GiB", "resident"),
        *("2", "min", "10", "s"),
    ]
    assert "unsupported" in lines[5]
    assert "no libaio" in lines[5]
    assert lines[6].strip() == "-> install it"
    assert lines[7] == "[3/3] zero2: begins  about 2 min 10 s left"
    assert len(lines) == 8


def test_one_live_line_on_a_terminal() -> None:
    progress, out, now = watch(terminal=True)
    recipe = "zero3_offload+bf16+checkpoint+accumulate:steps=4+adamw:impl=foreach+ema:place=cpu"
    progress.begin_suite("mine", [recipe], [True])
    progress.begin_run(recipe, 90)
    now.seconds = 65
    progress.status({"phase": "warmup", "step": 1, "of": 2})
    line = progress.line()
    assert line.plain == f"[1/1] warm-up 1/2  1 min 05 s  {recipe}"
    assert line.no_wrap
    progress.end_run(ok(recipe))
    progress.stop()
    assert progress.live is None
    assert "200.0 ms a step" in out.getvalue()

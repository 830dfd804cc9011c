"""Progress in a log file and on a terminal, with a clock of the test's own."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

from rich.console import Console

from harness.commands.progress import LiveLine, Predictions, Progress, Waiting, during
from harness.result import Result, Status
from harness.spec import Spec
from tests.made.predictions import prediction
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


def test_the_rest_counts_only_rows_that_will_run() -> None:
    progress, _, now = watch(terminal=False)
    progress.begin_suite("mine", list("abcd"), [True, True, False, True])
    progress.begin_run("a", None)
    assert progress.rest_seconds() is None
    now.seconds = 10
    progress.end_run(ok("ddp"))
    progress.begin_run("b", None)
    now.seconds = 14
    assert progress.rest_seconds() == 6 + 10


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


def test_a_wait_names_its_step_once_in_a_log_and_always_on_a_terminal() -> None:
    for terminal in (False, True):
        waiting, out, now = watch(terminal, functools.partial(Waiting, name="machine", expected=90))
        with waiting:
            for step in ("loading torch", "compiling cpu_adam", "", "compiling cpu_adam"):
                waiting.tell(step)
            now.seconds = 30
            line = "machine  30 s  about 1 min 00 s left: compiling cpu_adam"
            assert waiting.line().plain == line
        assert waiting.live is None
        if not terminal:
            lines = out.getvalue().splitlines()
            assert lines == ["machine: loading torch", "machine: compiling cpu_adam"]


def test_kept_predictions_do_not_count_in_the_time_left() -> None:
    predictions, _, now = watch(True, Predictions)
    predictions.begin(["a", "b", "c", "d"], "", {0, 1})
    predictions.done(0, prediction(1))
    assert predictions.rest_seconds() is None
    now.seconds = 8
    predictions.done(2, prediction(1))
    assert predictions.rest_seconds() == 8
    assert predictions.line().plain == "[1/2] predicting  8 s  about 8 s left  c"
    predictions.stop()
    assert predictions.live is None


def test_a_log_has_a_line_before_the_first_prediction_and_then_one_a_minute() -> None:
    predictions, out, now = watch(False, Predictions)
    told = []
    for names, why in [(["ddp", "kept"], "")] * 9 + [(["hsdp", "fsdp2"], "None fits; trying: ")]:
        with during(predictions, names, why, {1} if "kept" in names else ()):
            told.append(len(out.getvalue().splitlines()))
            for index in range(len(names)):
                now.seconds += 4.0
                predictions.done(index, prediction(1))
    assert out.getvalue().splitlines() == [
        "predicting; a line a minute",
        "[1/1] predicting  4 s  ddp",
        "None fits; trying",
    ]
    assert told[0] == 1, "it comes before any prediction has ended"


def test_predictions_of_earlier_calls_leave_no_line() -> None:
    predictions, out, _ = watch(False, Predictions)
    with during(predictions, ["ddp", "zero2"], "None fits; trying changes: ", {0, 1}):
        predictions.done(0, prediction(1))
        predictions.done(1, prediction(1))
    assert out.getvalue() == ""

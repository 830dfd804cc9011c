"""Predicted beside measured: categories, libraries, the allocator's mode, and verdicts."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from harness.memory.record import Instant
from harness.planner import pool
from harness.planner.comparison import predicted_and_measured
from harness.prediction import Prediction
from harness.report import build
from harness.report.figures.predicted import PredictedAndMeasured
from harness.report.rendering import export, markdown, sentences, tables
from harness.resolve import resolve, run_name
from harness.result import Result, Status
from harness.spec import Spec
from tests.made.predictions import prediction_of
from tests.made.results import GPU, MACHINE, MIB, cpu_set, gone, gpu_set

GIB = 2**30


def moved(prediction: Prediction, size: int, source: str, to: str) -> Prediction:
    """``size`` bytes of one category called another: the sum stays what it was."""
    sums = prediction.steady.categories
    sums[source] -= size
    sums[to] += size
    return prediction


def report_on(results: list[Result], *predictions: Prediction | None):
    found = zip(results, predictions, strict=False)
    return build(results, [], predictions={r.spec.key: p for r, p in found if p})


def compared(result: Result, prediction: Prediction) -> PredictedAndMeasured:
    return predicted_and_measured([result], {result.spec.key: prediction})


# ---- categories ----


def test_a_category_that_is_wrong_shows_where_the_sum_does_not():
    ddp, zero2 = (cpu_set()[name] for name in ("ddp", "zero2-r0"))
    wrong = moved(prediction_of(ddp), 63 * MIB, "gradients", "activations")
    report = report_on([ddp, zero2], wrong, prediction_of(zero2))
    row = next(row for row in report.groups[0].rows if row.label == "ddp")
    assert row.predicted.step_error == 0
    assert row.predicted.worst.name == "activations"
    assert row.predicted.worst.error == pytest.approx(63 / 96)


def test_what_is_below_5_percent_on_both_sides_is_not_compared():
    ddp = cpu_set()["ddp"]
    small = {part.name for part in compared(ddp, prediction_of(ddp)).categories}
    assert small == {
        "parameters",
        "gradients",
        "optimizer_state",
        "ema",
        "activations",
        "workspace",
    }
    ddp.ranks[0].categories.workspace = 4 * MIB
    right = prediction_of(ddp)
    assert "workspace" not in {part.name for part in compared(ddp, right).categories}
    grown = compared(ddp, moved(right, 60 * MIB, "activations", "temporaries"))
    assert grown.worst.name == "workspace" and grown.worst.error == 15


def test_a_category_that_the_run_did_not_have_is_infinitely_wrong_and_is_shown():
    ddp, other = (cpu_set()[name] for name in ("ddp", "zero3"))
    ddp.ranks[0].categories.workspace = 0
    wrong = moved(prediction_of(ddp), 60 * MIB, "activations", "temporaries")
    assert compared(ddp, wrong).worst.error == math.inf
    report = report_on([ddp, other], wrong, prediction_of(other))
    assert "largest inf % (workspace of ddp" in markdown.render(report)
    assert json.loads(export.json_text(report), parse_constant=pytest.fail)


def test_without_a_trace_no_category_is_guessed():
    ddp = cpu_set()["ddp"]
    bare = prediction_of(ddp, steady=None)
    report = report_on([ddp], bare)
    grids = tables.group_grids(report.groups[0])
    assert compared(ddp, bare).categories == () == tuple(grids["parts"].lines)
    assert "Worst category" not in grids["predicted"].heads
    assert "categories above" not in sentences.prediction_errors(report.groups[0])


@pytest.mark.parametrize(
    ("predicted", "measured", "error"),
    [
        (108_000, 1_888, None),
        (2 * MIB, 1_888, 1109.78),
        (MIB, 2 * MIB, -0.5),
        (None, 2 * MIB, None),
    ],
)
def test_a_host_that_holds_a_few_samples_alone_is_not_judged(predicted, measured, error):
    ddp = cpu_set()["ddp"]
    found = dataclasses.replace(
        compared(ddp, prediction_of(ddp)), hosted_predicted=predicted, hosted_measured=measured
    )
    assert found.hosted_error == (error and pytest.approx(error, abs=0.01))


# ---- a GPU's allocator ----


@pytest.mark.parametrize(
    ("device", "mib"), [("NVIDIA H100 80GB HBM3", 64), ("Abacus 3", 16.25), ("", 16.25)]
)
def test_a_gpu_s_peak_and_reserve_hold_the_libraries_workspaces(device, mib):
    row = gpu_set()["ddp"]
    row.environment = {**row.environment, "device": device}
    found = compared(row, prediction_of(row, allocated=30 * GIB, reserved=31 * GIB))
    assert found.run_predicted == 30 * GIB + mib * MIB
    assert found.reserved_predicted == 31 * GIB + mib * MIB
    assert found.step_predicted == row.ranks[0].categories.total  # no tensor of the step


def test_without_a_gpu_there_are_none():
    row = cpu_set()["ddp"]
    found = compared(row, prediction_of(row))
    assert found.run_predicted == row.ranks[0].categories.total
    assert found.reserved_predicted is None


@pytest.mark.parametrize(
    ("settings", "gib"),
    [
        ("default", 31),
        ("max_split_size_mb:128", 31),
        ("expandable_segments:True", 30),
        ("max_split_size_mb:128, expandable_segments: True", 30),
        ("expandable_segments:True,expandable_segments:False", 31),
        ("backend:cudaMallocAsync", None),
    ],
)
def test_what_is_reserved_is_predicted_for_the_mode_that_ran(settings, gib):
    row = gpu_set()["ddp"]
    row.environment = {**row.environment, "allocator": settings}
    prediction = prediction_of(row, reserved=31 * GIB, reserved_expandable=30 * GIB)
    found = compared(row, prediction).reserved_predicted
    assert found == (None if gib is None else gib * GIB + 64 * MIB)


# ---- fits or not ----


def test_rows_that_ran_out_of_memory_are_held_to_their_prediction():
    rows = gpu_set()
    lost, ddp, zero2 = rows["single"], rows["ddp"], rows["zero2-bf16"]
    died = gone("zero2", Status.GPU_OOM, "out of memory", None, **{**GPU, "processes": 2})
    lost.environment = died.environment = {}
    report = report_on(
        [lost, died, ddp, zero2],
        prediction_of(ddp, least=80 * GIB),
        prediction_of(ddp, least=20 * GIB),
        prediction_of(ddp, least=37 * GIB),
        prediction_of(ddp, least=90 * GIB),
    )
    said = (
        "Predicted not to fit: 1 of 2 rows that ran out of memory (predicted to fit: zero2), "
        "1 of 2 rows that finished (zero2+bf16)."
    )
    assert sentences.predicted_fits(report) == said
    fit = next(one for one in report.unfinished if one.label == "single").predicted_fit
    # Beside what the allocator holds: libraries and context, and no communication.
    assert fit.need_bytes == 80 * GIB + (64 + 450) * MIB
    assert fit.have_bytes == ddp.environment["device_bytes"]


def test_a_host_that_ran_out_is_held_to_what_all_processes_keep_there():
    row, ddp = gpu_set()["ddp"], cpu_set()["ddp"]
    row.status, ddp.status = Status.HOST_OOM, Status.HOST_OOM
    ddp.environment = {**MACHINE, "container_bytes": GIB}
    held = Instant(bytes=20 * GIB, phase="", op="", site="", categories={}, held=[])
    report = report_on([row, ddp], prediction_of(row, host=held, least=GIB), prediction_of(ddp))
    on_gpu, on_cpu = (one.predicted_fit for one in report.unfinished)
    assert (on_gpu.need_bytes, on_gpu.have_bytes) == (40 * GIB, MACHINE["memory_bytes"])
    assert (on_cpu.need_bytes, on_cpu.have_bytes) == (2 * ddp.ranks[0].categories.total, GIB)
    assert sentences.predicted_fits(report).startswith("Predicted not to fit: 2 of 2 rows")


def test_what_was_not_predicted_is_no_verdict():
    rows = gpu_set()
    lost, ddp = rows["single"], rows["ddp"]
    assert (
        sentences.predicted_fits(report_on([lost, ddp], None, prediction_of(ddp, least=GIB))) == ""
    )
    other = gone("zero1", Status.GPU_OOM, "out of memory", None, **{**GPU, "processes": 2})
    report = report_on([other, ddp, lost], prediction_of(ddp, least=99 * GIB), None, None)
    assert sentences.predicted_fits(report) == (
        "Predicted not to fit: 1 of 2 rows that ran out of memory (not predicted: single), "
        "0 of 0 rows that finished."
    )


def test_rows_that_ran_out_of_memory_are_predicted_too(tmp_path, monkeypatch):
    from rich.console import Console

    from harness.planner.hooks import predict_measured

    asked = []
    monkeypatch.setattr(pool, "predict_all", lambda rows, folder, **more: asked.extend(rows))
    ends = (Status.OK, Status.GPU_OOM, Status.HOST_OOM, Status.FAILED, Status.REFUSED)
    recipes = ("ddp", "single", "zero1", "zero2", "zero3")
    results = [
        Result(status=end, spec=Spec(recipe=recipe, data="synthetic"))
        for end, recipe in zip(ends, recipes, strict=True)
    ]
    rows = [resolve(result.spec) for result in results]
    predict_measured(results, rows, tmp_path, Console(quiet=True))
    assert [row.spec.recipe for row in asked] == ["ddp", "single", "zero1"]


def test_a_prediction_of_other_code_is_made_again(tmp_path, monkeypatch):
    """A trace is current if the cache has one under the name that today's code gives."""
    from rich.console import Console

    from harness.planner.hooks import predict_measured

    asked = []
    monkeypatch.setattr(pool, "predict_all", lambda rows, folder, **more: asked.extend(rows))
    results = [
        Result(status=Status.OK, spec=Spec(recipe=recipe, data="synthetic"))
        for recipe in ("ddp", "zero1", "zero2")
    ]
    rows = [resolve(result.spec) for result in results]
    for row, method in zip(rows, ("trace", "trace", "none"), strict=True):
        made = Prediction(recipe=row.spec.recipe, device="cpu", method=method, reason="")
        made.write(tmp_path / "runs" / run_name(row.spec) / "prediction.json")
    made.write(pool.path_of(rows[0], tmp_path / "predictions"))
    predict_measured(results, rows, tmp_path, Console(quiet=True))
    assert [row.spec.recipe for row in asked] == ["zero1"]

"""Predicted beside measured: categories, libraries, the allocator's mode, verdicts, and times."""

from __future__ import annotations

import csv
import dataclasses
import io
import json

import pytest
from rich.console import Console

from harness.memory.record import Instant
from harness.planner import hooks, pool
from harness.planner.comparison import predicted_and_measured, predicted_fit
from harness.prediction import Prediction, Work
from harness.report import SuiteHead, build
from harness.report.figures.predicted import PredictedAndMeasured, machine_facts
from harness.report.rendering import export, pages, sentences, tables
from harness.resolve import resolve, run_name
from harness.result import Result, Status
from harness.spec import Spec
from tests.made.calibrations import CPU, GIB, H200, MIB, made, rows
from tests.made.predictions import prediction_of
from tests.made.results import GPU, MACHINE, cpu_set, gone, gpu_set


def report_on(results: list[Result], *predictions: Prediction | None):
    found = zip(results, predictions, strict=False)
    return build(results, [], predictions={r.spec.key: p for r, p in found if p})


def compared(result: Result, prediction: Prediction) -> PredictedAndMeasured:
    return predicted_and_measured([result], {result.spec.key: prediction})


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


@pytest.mark.parametrize(("settings", "gib"), [
    ("default", 31), ("expandable_segments:True", 30),
    ("expandable_segments:True,expandable_segments:False", 31), ("backend:cudaMallocAsync", None),
])  # fmt: skip
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
    told = {
        one.label: one.predicted.fit.fits for one in (*report.unfinished, *report.groups[0].rows)
    }
    assert told == {"single": False, "zero2": True, "ddp": True, "zero2+bf16": False}
    grid = tables.unfinished_grid(report.unfinished)
    assert [line[grid.heads.index("Predicted to fit")] for line in grid.lines] == ["no", "yes"]
    fit = next(one for one in report.unfinished if one.label == "single").predicted.fit
    # Beside what the allocator holds: libraries and context, and no communication.
    assert fit.need_bytes == 80 * GIB + (64 + 518 + 240) * MIB
    assert fit.have_bytes == ddp.environment["device_bytes"]


def test_a_host_that_ran_out_is_held_to_what_all_processes_keep_there():
    row, ddp = gpu_set()["ddp"], cpu_set()["ddp"]
    row.status, ddp.status = Status.HOST_OOM, Status.HOST_OOM
    ddp.environment = {**MACHINE, "container_bytes": GIB}
    held = Instant(bytes=20 * GIB, phase="", op="", site="", categories={}, held=[])
    report = report_on([row, ddp], prediction_of(row, host=held, least=GIB), prediction_of(ddp))
    on_gpu, on_cpu = (one.predicted.fit for one in report.unfinished)
    assert (on_gpu.need_bytes, on_gpu.have_bytes) == (40 * GIB, MACHINE["memory_bytes"])
    assert (on_cpu.need_bytes, on_cpu.have_bytes) == (2 * ddp.ranks[0].categories.total, GIB)
    assert not on_gpu.fits and not on_cpu.fits


def test_rows_that_ran_or_ran_out_of_memory_are_predicted_and_of_other_code_again(
    tmp_path, monkeypatch
):
    """A trace is current if the cache has one under the name that today's code gives."""
    asked = []
    monkeypatch.setattr(pool, "predict_all", lambda rows, folder, **more: asked.extend(rows))
    ends = {"ddp": Status.OK, "single": Status.OK, "zero1": Status.GPU_OOM,
            "zero2": Status.HOST_OOM, "zero3": Status.FAILED, "fsdp2": Status.REFUSED}  # fmt: skip
    specs = [Spec(recipe=recipe, data="synthetic") for recipe in ends]
    rows = [resolve(spec) for spec in specs]
    for row in rows[:2]:
        made = Prediction(recipe=row.spec.recipe, device="cpu", method="trace", reason="")
        made.write(tmp_path / "runs" / run_name(row.spec) / "prediction.json")
    made.write(pool.path_of(rows[0], tmp_path / "predictions"))
    results = [Result(status=ends[spec.recipe], spec=spec) for spec in specs]
    hooks.predict_measured(results, rows, tmp_path, Console(quiet=True))
    assert [row.spec.recipe for row in asked] == ["single", "zero1", "zero2"]


# ---- times, by a calibration ----


EPYC = dataclasses.replace(CPU, name="AMD EPYC 7B13, 8 cores", cores=8, torch="2.9.0+cpu")
CARD = dataclasses.replace(
    H200, name="NVIDIA H100 80GB HBM3", driver="570.124.06", torch="2.9.0+cu128"
)


def work(seconds: float) -> list[Work]:
    """Products that take so long at 50 TFLOP/s, shared by two processes."""
    flops = int(seconds * 50e12 / 2)
    kind = {"phase": "forward", "kind": "product", "dtype": "float32"}
    return [Work(**kind, flops=flops, bytes=8, count=1)]


def report(found, results, **more):
    predictions = {r.spec.key: prediction_of(r, work=work(0.4), **more) for r in results}
    return build(results, [], SuiteHead(calibration=found), predictions)


def test_a_row_stands_beside_the_time_that_its_device_s_calibration_predicts():
    ddp = cpu_set()["ddp"]
    found = report(made(EPYC, rows=rows(1.25)), [ddp])
    only = found.groups[0].rows[0].predicted.times
    assert only.predicted_seconds == pytest.approx(0.4 * 1.25)
    assert (only.low_seconds, only.high_seconds) == pytest.approx((0.5 / 1.03, 0.515))
    assert only.error == pytest.approx(0.5 / only.measured_seconds - 1)
    said = sentences.prediction_errors(found.groups[0])
    assert "Calibrated: AMD EPYC 7B13, 8 cores, torch 2.9.0+cpu, 2026-11-22" in said
    for text in (pages.render_markdown(found), pages.render_html(found)):
        assert "Calibrated: AMD EPYC" in text
    data = json.loads(export.json_text(found))["groups"][0]["rows"][0]["predicted"]
    assert data["calibrated_step_seconds"] == pytest.approx(0.5)
    line = next(csv.DictReader(io.StringIO(export.csv_text(found))))
    assert float(line["calibrated_step_seconds"]) == pytest.approx(0.5)


def test_without_one_or_with_another_device_s_there_is_no_such_table():
    ddp = cpu_set()["ddp"]
    for found in (None, made(CPU), made(CARD)):
        plain = report(found, [ddp])
        assert plain.groups[0].rows[0].predicted.times is None
        assert "Calibrated" not in sentences.prediction_errors(plain.groups[0])
        line = next(csv.DictReader(io.StringIO(export.csv_text(plain))))
        assert line["calibrated_step_seconds"] == ""


def test_a_gpu_s_reserve_and_fit_hold_what_was_measured_to_stand_beside():
    ddp = gpu_set()["ddp"]
    told = prediction_of(ddp, allocated=30 * GIB, reserved=31 * GIB, least=29 * GIB)
    found = predicted_and_measured([ddp], {ddp.spec.key: told}, made(CARD))
    assert found.run_predicted == 30 * GIB + 70 * MIB
    need = predicted_fit(ddp, Status.OK, told, machine_facts([ddp]), made(CARD)).need_bytes
    beside = 570 + 200 * (ddp.spec.processes > 1)
    assert need == 29 * GIB + beside * MIB
    assert need != predicted_fit(ddp, Status.OK, told, machine_facts([ddp])).need_bytes

"""Predicted beside measured: categories, libraries, the allocator's mode, verdicts, and times."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math

import pytest
from rich.console import Console

from harness.memory.memory_breakdown import MemoryBreakdown
from harness.memory.record import Instant
from harness.planner import hooks, pool
from harness.planner.comparison import predicted_and_measured, predicted_fit
from harness.planner.speed import rates
from harness.prediction import Prediction, Work
from harness.report import SuiteHead, build, read_suite
from harness.report.figures.predicted import PredictedAndMeasured, machine_facts
from harness.report.rendering import export, pages, sentences, tables
from harness.resolve import resolve, run_name
from harness.result import Result, Status
from harness.spec import Spec
from tests.made.calibrations import CPU, GIB, H200, MIB, made, rows
from tests.made.calibrations import row as fitted
from tests.made.predictions import prediction_of
from tests.made.results import GPU, H100, MACHINE, cpu_set, gone, gpu_set


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


def worst(found: PredictedAndMeasured):
    """The category with the largest error."""
    return max(found.categories, key=lambda category: abs(category.error))


# ---- categories ----


def test_a_category_that_is_wrong_shows_where_the_sum_does_not():
    ddp, zero2 = (cpu_set()[name] for name in ("ddp", "zero2-r0"))
    wrong = moved(prediction_of(ddp), 63 * MIB, "gradients", "activations")
    report = report_on([ddp, zero2], wrong, prediction_of(zero2))
    row = next(row for row in report.groups[0].rows if row.label == "ddp")
    assert row.predicted.step_error == 0
    assert worst(row.predicted).name == "activations"
    assert worst(row.predicted).error == pytest.approx(63 / 96)


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
    assert worst(grown).name == "workspace" and worst(grown).error == 15


def test_a_category_that_the_run_did_not_have_is_infinitely_wrong_and_is_shown():
    ddp, other = (cpu_set()[name] for name in ("ddp", "zero3"))
    ddp.ranks[0].categories.workspace = 0
    wrong = moved(prediction_of(ddp), 60 * MIB, "activations", "temporaries")
    assert worst(compared(ddp, wrong)).error == math.inf
    report = report_on([ddp, other], wrong, prediction_of(other))
    assert "largest inf % (workspace of ddp" in pages.render_markdown(report)
    assert json.loads(export.json_text(report), parse_constant=pytest.fail)


def test_without_a_trace_no_category_is_guessed():
    ddp = cpu_set()["ddp"]
    bare = prediction_of(ddp, steady=None)
    report = report_on([ddp], bare)
    assert compared(ddp, bare).categories == ()
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
    assert fit.need_bytes == 80 * GIB + (64 + 518 + 240) * MIB
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


def test_rows_that_ran_out_of_memory_are_predicted_too(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(pool, "predict_all", lambda rows, folder, **more: asked.extend(rows))
    ends = (Status.OK, Status.GPU_OOM, Status.HOST_OOM, Status.FAILED, Status.REFUSED)
    recipes = ("ddp", "single", "zero1", "zero2", "zero3")
    results = [
        Result(status=end, spec=Spec(recipe=recipe, data="synthetic"))
        for end, recipe in zip(ends, recipes, strict=True)
    ]
    rows = [resolve(result.spec) for result in results]
    hooks.predict_measured(results, rows, tmp_path, Console(quiet=True))
    assert [row.spec.recipe for row in asked] == ["ddp", "single", "zero1"]


def test_a_prediction_of_other_code_is_made_again(tmp_path, monkeypatch):
    """A trace is current if the cache has one under the name that today's code gives."""
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
    hooks.predict_measured(results, rows, tmp_path, Console(quiet=True))
    assert [row.spec.recipe for row in asked] == ["zero1"]


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


def cells(made_report, row_index: int = 0) -> dict[str, str]:
    grids = tables.group_grids(made_report.groups[0])
    grid = next(grid for grid in grids if grid.key == "predicted")
    return dict(zip(grid.heads, grid.lines[row_index], strict=True))


def test_a_row_stands_beside_the_time_that_its_device_s_calibration_predicts():
    ddp = cpu_set()["ddp"]
    found = report(made(EPYC, rows=rows(1.25)), [ddp])
    only = found.groups[0].rows[0].calibrated
    assert only.predicted_seconds == pytest.approx(0.4 * 1.25)
    assert (only.low_seconds, only.high_seconds) == pytest.approx((0.5 / 1.03, 0.515))
    assert only.error == pytest.approx(0.5 / only.measured_seconds - 1)
    line = cells(found)
    assert line["Step, predicted ms"] == "500.0"
    said = sentences.calibration(found.groups[0])
    assert said.startswith("Calibrated: AMD EPYC 7B13, 8 cores, torch 2.9.0+cpu, 2026-11-22")
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
        assert plain.groups[0].rows[0].calibrated is None
        assert sentences.calibration(plain.groups[0]) == ""
        line = next(csv.DictReader(io.StringIO(export.csv_text(plain))))
        assert line["calibrated_step_seconds"] == ""


def test_no_calibration_knows_the_network_between_machines():
    ddp = cpu_set()["ddp"]
    apart = dataclasses.replace(ddp, spec=dataclasses.replace(ddp.spec, nodes=2))
    ends = [report(made(EPYC), [one]).groups[0].rows[0].calibrated for one in (ddp, apart)]
    assert ends[0] is not None and ends[1] is None


def test_processes_of_several_machines_do_not_share_one_memory():
    ddp = cpu_set()["ddp"]
    apart = dataclasses.replace(ddp, spec=dataclasses.replace(ddp.spec, nodes=2))
    needs = [
        predicted_fit(one, Status.OK, prediction_of(one), machine_facts([one])).need_bytes
        for one in (ddp, apart)
    ]
    assert needs[0] == 2 * needs[1] > 0


def test_a_gpu_s_reserve_and_fit_hold_what_was_measured_to_stand_beside():
    ddp = gpu_set()["ddp"]
    told = prediction_of(ddp, allocated=30 * GIB, reserved=31 * GIB, least=29 * GIB)
    found = predicted_and_measured([ddp], {ddp.spec.key: told}, made(CARD))
    assert found.run_predicted == 30 * GIB + 70 * MIB
    need = predicted_fit(ddp, Status.OK, told, machine_facts([ddp]), made(CARD)).need_bytes
    beside = 570 + 200 * (ddp.spec.processes > 1)
    assert need == 29 * GIB + beside * MIB
    assert need != predicted_fit(ddp, Status.OK, told, machine_facts([ddp])).need_bytes


def test_a_row_that_ran_out_of_memory_is_judged_by_it_too():
    """A row that died tells nothing of its machine: the other rows of the set do."""
    lost = dataclasses.replace(gpu_set()["ddp"], status=Status.GPU_OOM, environment={})
    told = prediction_of(gpu_set()["ddp"], least=29 * GIB)
    card = machine_facts([gpu_set()["ddp"]])
    with_it = predicted_fit(lost, Status.GPU_OOM, told, card, made(CARD))
    without = predicted_fit(lost, Status.GPU_OOM, told, card)
    assert with_it.need_bytes != without.need_bytes
    assert predicted_fit(lost, Status.GPU_OOM, told, machine_facts([])) is None


def test_the_calibration_lies_beside_the_results(tmp_path, monkeypatch):
    own = rates.store.applied(made(EPYC))
    monkeypatch.setattr(rates, "kept_for", lambda device: own)
    rates.keep_beside(tmp_path, "cpu")
    assert read_suite(tmp_path).calibration == made(EPYC)
    (tmp_path / rates.FILE).write_text("{")
    assert read_suite(tmp_path).calibration is None
    monkeypatch.setattr(rates, "kept_for", lambda device: None)
    rates.keep_beside(tmp_path / "none", "cpu")
    assert not (tmp_path / "none").exists()


def test_a_driver_that_is_another_than_the_run_s_is_marked():
    environment = {**H100, "driver": "999.1"}
    card = rates.of_environment(environment, made(CARD))
    assert card.calibrated.marks == ("here driver 999.1",)
    assert rates.of_environment(H100, made(CARD)).calibrated.marks == ()
    assert rates.of_environment({**MACHINE, "cores": 4}, made(EPYC)).calibrated.marks


def test_an_anatomy_stands_under_the_ceilings_of_its_device(monkeypatch):
    names = {f.name: None for f in dataclasses.fields(MemoryBreakdown) if f.name != "schema"}
    plain = MemoryBreakdown(**{**names, "device": "cpu", "dtype": "float32", "processes": 2,
                        "peak_flops": 1.0, "bandwidth": 2.0, "ceilings": ""})  # fmt: skip
    own = rates.store.applied(made(EPYC))
    monkeypatch.setattr(rates, "kept_for", {"cpu": own}.get)
    found = hooks.under_ceilings(plain)
    assert (found.peak_flops, found.bandwidth) == (25e12, 2e12)
    assert found.ceilings.startswith("Calibrated: AMD EPYC")
    card = dataclasses.replace(plain, device="cuda")
    assert hooks.under_ceilings(card) is card
    other = dataclasses.replace(plain, dtype="float16")
    assert hooks.under_ceilings(other) is other, "what was not measured stays the run's own"


def test_rows_are_fitted_whatever_their_order():
    told = [*rows(1.25), fitted("ddp", 3.0, 1.0, communication=1.0, processes=2)]
    one, two = (made(EPYC, rows=list(order)) for order in (told, reversed(told)))
    first, second = (rates.store.applied(c).fitted.factors for c in (one, two))
    assert first == pytest.approx(second)

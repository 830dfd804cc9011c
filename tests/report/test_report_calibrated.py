"""A report beside a calibration of its device: times, their uncertainty, and what it rests on."""

from __future__ import annotations

import csv
import dataclasses
import io
import json

import pytest

from harness.memory.memory_breakdown import MemoryBreakdown
from harness.planner import hooks
from harness.planner.comparison import predicted_and_measured, predicted_fit
from harness.planner.speed import rates
from harness.prediction import Work
from harness.report import build, read_suite
from harness.report.data.rows import SuiteHead
from harness.report.figures.predicted import machine_facts
from harness.report.rendering import export, html, markdown, sentences, tables
from harness.result import Status
from tests.made.calibrations import CPU, GIB, H200, MIB, made, row, rows
from tests.made.predictions import prediction_of
from tests.made.results import H100, MACHINE, cpu_set, gpu_set

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
    grid = tables.group_grids(made_report.groups[0])["calibrated"]
    assert grid.lines, "there is no table"
    return dict(zip(grid.heads, grid.lines[row_index], strict=True))


def test_a_row_stands_beside_the_time_that_its_device_s_calibration_predicts():
    ddp = cpu_set()["ddp"]
    found = report(made(EPYC, rows=rows(1.25)), [ddp])
    only = found.groups[0].rows[0].calibrated
    assert only.predicted_seconds == pytest.approx(0.4 * 1.25)
    assert only.spread_seconds == pytest.approx(0.03 * 0.5)
    assert only.error == pytest.approx(0.5 / only.measured_seconds - 1)
    line = cells(found)
    assert line["Step, predicted ms"] == "500.0" and line["Plus or minus ms"].startswith("15.0")
    said = sentences.calibration(found.groups[0])
    assert said.startswith("Calibrated: AMD EPYC 7B13, 8 cores, torch 2.9.0+cpu, 2026-11-22")
    for text in (markdown.render(found), html.render(found)):
        assert "Time, predicted by this device" in text and "Calibrated: AMD EPYC" in text
    data = json.loads(export.json_text(found))["groups"][0]["rows"][0]["predicted"]
    assert data["calibrated_step_seconds"] == pytest.approx(0.5)
    line = next(csv.DictReader(io.StringIO(export.csv_text(found))))
    assert float(line["calibrated_step_seconds_spread"]) == pytest.approx(0.015)


def test_without_one_or_with_another_device_s_there_is_no_such_table():
    ddp = cpu_set()["ddp"]
    for found in (None, made(CPU), made(CARD)):
        plain = report(found, [ddp])
        assert plain.groups[0].rows[0].calibrated is None
        assert not tables.group_grids(plain.groups[0])["calibrated"].lines
        assert sentences.calibration(plain.groups[0]) == ""
        assert "calibrated_step_seconds" not in export.csv_text(plain)


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


def test_a_share_of_the_measured_peak_is_of_each_gpu_and_of_all_of_a_cpu():
    on_cpu, on_gpu = cpu_set()["ddp"], gpu_set()["ddp"]
    both = {}
    for result, device in ((on_cpu, EPYC), (on_gpu, CARD)):
        found = report(made(device), [result]).groups[0].rows[0].calibrated
        both[device.kind] = found.peak_fraction
        ranks = len(result.ranks) if device is CARD else 1
        wanted = result.flops_per_step / found.measured_seconds / 50e12 / ranks
        assert found.peak_fraction == pytest.approx(wanted)
    assert both["cpu"] > 0 < both["cuda"]


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
    names = {
        f.name: None
        for f in dataclasses.fields(MemoryBreakdown)
        if f.name not in ("schema", "world")
    }
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
    told = [*rows(1.25), row("ddp", 3.0, 1.0, communication=1.0, processes=2)]
    one, two = (made(EPYC, rows=list(order)) for order in (told, reversed(told)))
    first, second = (rates.store.applied(c).fitted.factors for c in (one, two))
    assert first == pytest.approx(second)

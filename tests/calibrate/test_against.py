"""Planned times held to measured ones: the arithmetic on made rows, and a plan for a CPU against
steps that were recorded on it."""

from __future__ import annotations

import dataclasses
import json
import statistics

import pytest

from harness import ROOT, cli
from harness.planner import pool
from harness.planner.calibrate.command import Held, compared, held
from harness.planner.calibration import record, store
from harness.planner.calibration.record import fitted, left_out_errors, predicted_seconds
from harness.planner.speed import rates
from harness.prediction import Work
from harness.result import Status
from harness.system import cards
from tests.made.calibrations import CPU, made, row, rows
from tests.made.predictions import prediction_of
from tests.made.results import cpu_set, done

FOLDER = ROOT / "tests/golden/cpu-calibration"


def work(seconds: float) -> tuple[Work, ...]:
    """Products that take so long at 50 TFLOP/s."""
    kind = {"phase": "forward", "kind": "product", "dtype": "float32"}
    return (Work(**kind, flops=int(seconds * 50e12), bytes=8, count=1),)


def card(calibration) -> cards.Card:
    found = store.applied(calibration)
    return dataclasses.replace(rates.of_device(calibration.device), calibrated=found)


# ---- arithmetic ----


def test_a_row_is_held_to_its_measured_step():
    one = Held(recipe="single", processes=1, work=work(1.0), measured=1.0)
    assert one.error(card(made(CPU, rows=rows(1.25)))) == pytest.approx(0.25)
    two = dataclasses.replace(one, processes=2)
    assert two.error(card(made(CPU, rows=rows(1.25)))) == pytest.approx(1.5), "they share it"
    typical = dataclasses.replace(card(made(CPU)), calibrated=None)
    assert one.error(typical) == pytest.approx(50e12 / (0.75 * 2 * 64e9) - 1)


def test_the_table_shows_both_and_counts_what_lies_within():
    near = Held(recipe="single", processes=1, work=work(1.0), measured=1.24)
    far = Held(recipe="single+lora", processes=1, work=work(1.0), measured=2.5)
    found = compared([near, far], card(made(CPU, rows=rows(1.25))))
    assert found.lines[0][2] == "1240" and found.lines[0][5:] == ["1250 (1214-1287)", "+1"]
    assert found.lines[1][6] == "-50"
    assert "Calibrated: median error 25 %, largest 50 %, 1 of 2 within" in found.note


def test_rows_without_a_prediction_or_an_end_are_left_out():
    ddp, zero3 = cpu_set()["ddp"], cpu_set()["zero3"]
    void = dataclasses.replace(zero3, status=Status.VOID)
    again = done("ddp", 0.5, (1,) * 6, repeat=1)
    known = {r.spec.key: prediction_of(r, work=list(work(0.1))) for r in (ddp, void, again)}
    assert [one.recipe for one in held([ddp, void, again], known)] == ["ddp"]
    assert held([ddp], {}) == []


# ---- a CPU, planned and measured ----


def from_json(data: list[dict]) -> list[Held]:
    return [Held(**{**row, "work": tuple(Work(**w) for w in row["work"])}) for row in data]


@pytest.fixture(scope="module")
def recorded() -> tuple[list[Held], record.Calibration]:
    """Steps of the default suite that were measured on a CPU, and that CPU's calibration."""
    data = json.loads((FOLDER / "steps.json").read_text())
    return from_json(data), record.load(FOLDER / "calibration.json")


def without(calibration: record.Calibration, one: Held) -> cards.Card:
    """The CPU as it was calibrated by all other rows."""
    others = [row for row in calibration.rows if row.recipe != one.recipe]
    assert len(others) == len(calibration.rows) - 1
    return card(dataclasses.replace(calibration, rows=others))


def test_a_calibrated_plan_is_nearer_to_measured_steps_than_a_typical_one(recorded):
    steps, calibration = recorded
    plain = dataclasses.replace(card(calibration), calibrated=None)
    typical = [abs(one.error(plain)) for one in steps]
    own = [abs(one.error(without(calibration, one))) for one in steps]
    assert len(steps) == 10 and statistics.median(typical) > 0.5
    assert statistics.median(own) < 0.15 < 0.2 * statistics.median(typical)
    for one in steps:
        known, usual = (one.predicted(c) for c in (without(calibration, one), plain))
        assert known.high / known.total < 1.35 < usual.high / usual.total


def test_nine_of_ten_steps_are_within_what_the_others_say(recorded):
    _, calibration = recorded
    inside = []
    for one in calibration.rows:
        others = fitted([other for other in calibration.rows if other is not one])
        total = predicted_seconds(one, others.factors)
        inside.append(abs(total - one.step_seconds) <= others.shares["compute"] * total)
    assert len(inside) == 23 and sum(inside) >= 0.9 * len(inside) - 1, "give or take one"


def test_the_recorded_errors_are_those_of_the_recorded_work(recorded):
    """The table has them from parts that were kept; here they follow from every operation."""
    steps, calibration = recorded
    made = left_out_errors(calibration.rows)
    errors = {row.recipe: error for row, error in zip(calibration.rows, made, strict=True)}
    for one in steps:
        assert one.error(without(calibration, one)) == pytest.approx(errors[one.recipe], abs=1e-6)


def test_one_that_was_fitted_to_wrong_steps_is_not_near(recorded):
    steps, calibration = recorded
    slow = [dataclasses.replace(r, step_seconds=2 * r.step_seconds) for r in calibration.rows]
    wrong = card(dataclasses.replace(calibration, rows=slow))
    assert statistics.median(abs(one.error(wrong)) for one in steps) > 0.8


# ---- the command ----


def test_the_command_compares_and_keeps_what_it_compared(tmp_path, capsys, monkeypatch):
    results = [cpu_set()[name] for name in ("ddp", "zero3")]
    for result in results:
        result.write(tmp_path / "r" / "runs" / result.spec.key / "result.json")
    monkeypatch.setattr(store, "OWN", tmp_path / "own")
    monkeypatch.setattr(
        pool, "predict_all", lambda given, folder, **more: [
            prediction_of(r, work=list(work(0.001))) for r in (
                next(x for x in results if x.spec == row.spec) for row in given
            )
        ],
    )  # fmt: skip
    words = ["calibrate", "--against", str(tmp_path / "r"), "--json", str(tmp_path / "s.json")]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "Steps of AMD EPYC 7B13, planned and measured" in text and "typical figures" in text
    assert "Typical ms" in text and "Calibrated ms" not in text
    told = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert {one.recipe for one in from_json(told)} == {
        "ddp", "zero3",
    }  # fmt: skip


def test_a_part_of_the_catalog_that_no_row_tells_of_is_typical_in_the_table():
    sent = Work(phase="backward", kind="collective", dtype="", flops=0, bytes=10**9, count=1)
    one = Held(recipe="ddp", processes=2, work=(sent,), measured=1.0)
    found = one.predicted(card(made(CPU, rows=[*rows(), row("single+sgd", 2.5, 2.0)])))
    assert (found.high / found.total, found.total / found.low) == pytest.approx((2, 2))

"""Steps that were measured on a CPU, predicted by what its calibration tells of other rows."""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass

import pytest

from harness import ROOT
from harness.planner.calibration import record, store
from harness.planner.calibration.record import fitted, predicted_seconds
from harness.planner.speed import rates
from harness.planner.speed.roofline import Seconds, seconds
from harness.prediction import Work
from harness.system import cards
from tests.made.calibrations import CPU, made, row, rows

FOLDER = ROOT / "tests/golden/cpu-calibration"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A measured step time in seconds, and the work from which it is predicted."""

    recipe: str
    processes: int
    work: tuple[Work, ...]
    measured: float

    def predicted(self, on: cards.Card) -> Seconds:
        return seconds(self.work, on, self.processes, self.recipe)

    def error(self, on: cards.Card) -> float:
        return self.predicted(on).total / self.measured - 1


def work(seconds: float) -> tuple[Work, ...]:
    """Products that take so long at 50 TFLOP/s."""
    kind = {"phase": "forward", "kind": "product", "dtype": "float32"}
    return (Work(**kind, flops=int(seconds * 50e12), bytes=8, count=1),)


def card(calibration) -> cards.Card:
    found = store.applied(calibration)
    return dataclasses.replace(rates.of_device(calibration.device), calibrated=found)


# ---- arithmetic ----


def test_a_step_takes_its_work_at_the_fitted_rate_and_processes_share_it():
    one = Step(recipe="single", processes=1, work=work(1.0), measured=1.0)
    assert one.error(card(made(CPU, rows=rows(1.25)))) == pytest.approx(0.25)
    two = dataclasses.replace(one, processes=2)
    assert two.error(card(made(CPU, rows=rows(1.25)))) == pytest.approx(1.5), "they share it"
    typical = dataclasses.replace(card(made(CPU)), calibrated=None)
    assert one.error(typical) == pytest.approx(50e12 / (0.75 * 2 * 64e9) - 1)


def test_the_range_of_a_time_is_the_uncertainty_of_its_rows():
    one = Step(recipe="single", processes=1, work=work(1.0), measured=1.24)
    found = one.predicted(card(made(CPU, rows=rows(1.25))))
    ends = (found.low, found.total, found.high)
    assert ends == pytest.approx((1.25 / 1.03, 1.25, 1.25 * 1.03))


def test_a_part_of_the_catalog_that_no_row_tells_of_is_typical():
    sent = Work(phase="backward", kind="collective", dtype="", flops=0, bytes=10**9, count=1)
    one = Step(recipe="ddp", processes=2, work=(sent,), measured=1.0)
    found = one.predicted(card(made(CPU, rows=[*rows(), row("single+sgd", 2.5, 2.0)])))
    assert (found.high / found.total, found.total / found.low) == pytest.approx((2, 2))


# ---- a CPU, planned and measured ----


@pytest.fixture(scope="module")
def recorded() -> tuple[list[Step], record.Calibration]:
    """Steps of the default suite that were measured on a CPU, and that CPU's calibration."""
    data = json.loads((FOLDER / "steps.json").read_text())
    steps = [Step(**{**one, "work": tuple(Work(**w) for w in one["work"])}) for one in data]
    return steps, record.load(FOLDER / "calibration.json")


def without(calibration: record.Calibration, one: Step) -> cards.Card:
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
    """A calibration keeps the parts of a row; here they follow from every operation."""
    steps, calibration = recorded
    kept = {row.recipe: row for row in calibration.rows}
    for one in steps:
        others = without(calibration, one)
        total = predicted_seconds(kept[one.recipe], others.calibrated.fitted.factors)
        error = total / kept[one.recipe].step_seconds - 1
        assert one.error(others) == pytest.approx(error, abs=1e-6)


def test_one_that_was_fitted_to_wrong_steps_is_not_near(recorded):
    steps, calibration = recorded
    slow = [dataclasses.replace(r, step_seconds=2 * r.step_seconds) for r in calibration.rows]
    wrong = card(dataclasses.replace(calibration, rows=slow))
    assert statistics.median(abs(one.error(wrong)) for one in steps) > 0.8

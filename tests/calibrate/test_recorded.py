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


def card(calibration) -> cards.Card:
    found = store.applied(calibration)
    return dataclasses.replace(rates.of_device(calibration.device), calibrated=found)


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


def test_one_that_was_fitted_to_wrong_steps_is_not_near(recorded):
    steps, calibration = recorded
    slow = [dataclasses.replace(r, step_seconds=2 * r.step_seconds) for r in calibration.rows]
    wrong = card(dataclasses.replace(calibration, rows=slow))
    assert statistics.median(abs(one.error(wrong)) for one in steps) > 0.8

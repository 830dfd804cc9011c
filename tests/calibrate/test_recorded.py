"""Steps that were measured on a CPU, predicted by what its calibration tells of other rows."""

from __future__ import annotations

import dataclasses
import json
import statistics

import pytest

from harness import ROOT
from harness.planner.calibration import record, store
from harness.planner.calibration.record import fitted, predicted_seconds
from harness.planner.speed import rates
from harness.planner.speed.roofline import Seconds, seconds
from harness.prediction import Work

FOLDER = ROOT / "tests/golden/cpu-calibration"


Recorded = tuple[list[dict], record.Calibration]


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """Steps of the default suite that were measured on a CPU, and that CPU's calibration."""
    steps = json.loads((FOLDER / "steps.json").read_text())
    return steps, record.load(FOLDER / "calibration.json")


def predicted(one: dict, calibration: record.Calibration | None, device: record.Device) -> Seconds:
    """Seconds of a step, by a calibration or by typical figures."""
    applied = calibration and store.applied(calibration)
    on = dataclasses.replace(rates.of_device(device), calibrated=applied)
    return seconds([Work(**w) for w in one["work"]], on, one["processes"], one["recipe"])


def without(calibration: record.Calibration, one: dict) -> record.Calibration:
    """The calibration by all other rows."""
    others = [row for row in calibration.rows if row.recipe != one["recipe"]]
    assert len(others) == len(calibration.rows) - 1
    return dataclasses.replace(calibration, rows=others)


def test_a_calibrated_plan_is_nearer_to_measured_steps_than_a_typical_one(recorded):
    steps, calibration = recorded
    errors: dict[str, list[float]] = {"typical": [], "own": []}
    for one in steps:
        usual = predicted(one, None, calibration.device)
        known = predicted(one, without(calibration, one), calibration.device)
        for kind, found in (("typical", usual), ("own", known)):
            errors[kind].append(abs(found.total / one["measured"] - 1))
        assert known.high / known.total < 1.35 < usual.high / usual.total
    typical, own = map(statistics.median, errors.values())
    assert len(steps) == 10 and typical > 0.5 and own < 0.15 < 0.2 * typical


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
    wrong = dataclasses.replace(calibration, rows=slow)
    found = [predicted(one, wrong, calibration.device).total / one["measured"] for one in steps]
    assert statistics.median(abs(times - 1) for times in found) > 0.8

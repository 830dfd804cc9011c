"""Calibrations as files, what their rows tell of predicted times, and which one is for a card."""

from __future__ import annotations

import dataclasses
import json
import statistics

import pytest

from harness import ROOT
from harness.planner import uncertainty
from harness.planner.calibration import record, store
from harness.planner.calibration.record import FLOOR, LOWEST, fitted, predicted_seconds
from harness.planner.speed import rates
from harness.planner.speed.roofline import Seconds, seconds
from harness.prediction import Work
from strategies.base import BadInput
from tests.made.calibrations import CPU, H200, made, row, rows

# ---- the file ----


def test_a_calibration_is_read_back_as_it_was_written(tmp_path):
    file = tmp_path / "c.json"
    made().write(file)
    assert record.load(file) == made()
    assert file.stat().st_size < 10_000


@pytest.mark.parametrize(("text", "said"), [
    ("{", "unreadable as JSON"), ('{"recipe": "ddp"}', "not a calibration file"),
    ('{"schema": 99}', "schema 99, this version reads 1"),
    ('{"schema": 1, "devize": {}}', "unknown field 'devize'"),
    ('{"schema": 1, "measured": 3}', "measured should be str"),
])  # fmt: skip
def test_a_file_that_is_none_is_refused_with_its_name(text, said, tmp_path):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(BadInput, match=f"c.json.*{said}"):
        record.load(tmp_path / "c.json")


# ---- factors and uncertainty ----


def test_one_factor_explains_rows_that_are_alike_and_little_uncertainty_is_left():
    found = fitted(rows(1.25))
    assert found.factors == {"compute": pytest.approx(1.25)}
    assert found.shares == {"compute": FLOOR} and found.rows == 4


def test_each_part_gets_the_factor_that_explains_all_rows_together():
    told = [
        *rows(1.25),
        row("ddp", 1.25 + 3 * 0.5, 1.0, communication=0.5, processes=2),
        row("zero3", 2.5 + 3 * 1.0, 2.0, communication=1.0, processes=2),
        row("zero2_offload", 1.25 + 3 * 0.5 + 0.5 * 2, 1.0, communication=0.5, offload=2.0),
        row("zero3_offload", 1.25 + 3 * 0.5 + 0.5 * 4, 1.0, communication=0.5, offload=4.0),
    ]
    found = fitted(told)
    assert found.factors["communication"] == pytest.approx(3.0)
    assert found.factors["offload"] == pytest.approx(0.5)
    assert set(found.shares) == {"compute", "communication", "offload"} and found.rows == 8


def test_no_factor_is_below_the_least():
    told = [*rows(1.25), row("ddp", 1.2, 1.0, communication=0.5),
            row("zero3", 2.4, 2.0, communication=0.9)]  # fmt: skip
    factors = fitted(told).factors
    assert factors["communication"] == LOWEST and 1.0 < factors["compute"] < 1.25


def test_too_few_rows_say_nothing():
    assert fitted(rows()[:2]) == fitted([])
    assert fitted([dataclasses.replace(r, status="void") for r in rows()]).rows == 0
    only_offload = [row(f"zero2_offload x{i}", 3.0, 1.0, offload=1.0) for i in range(5)]
    assert fitted(only_offload).rows == 0


def test_no_row_is_outside_the_uncertainty():
    found = fitted([*rows(1.25), row("single+lora", 2.5, 1.0)])
    wide, factor = found.shares["compute"], found.factors["compute"]
    assert 1 + wide == pytest.approx(2.5 / factor) and 1.25 < factor < 2.5


# ---- which one is for a card ----


def test_the_best_is_of_this_driver_and_torch_and_then_the_newest():
    old = made(device=dataclasses.replace(H200, driver="535.10"), measured="2026-12-30")
    same, newer = (made(measured=f"2026-11-{day}") for day in ("01", "20"))
    found = store.choose([old, same, newer], driver="580.65", torch="2.13.0+cu126")
    assert found.calibration is newer and found.marks == ()
    other = store.choose([old], driver="580.65", torch="2.12.1")
    assert other.marks == ("here driver 580.65", "here torch 2.12.1")
    assert store.choose([]) is None


@pytest.mark.parametrize(("device", "load", "cores", "marks"), [
    (CPU, 0.1, 2, ()), (CPU, 3.5, 2, ("beside other work on 3.5 cores",)),
    (CPU, 0.1, 4, ("here 4 cores",)), (H200, 3.5, 2, ()),  # a GPU computes by itself
])  # fmt: skip
def test_a_cpu_that_others_used_or_with_other_cores_is_marked(device, load, cores, marks):
    found = store.applied(made(device, load=load), cores=cores)
    assert len(found.marks) == len(marks) and all(mark in found.words for mark in marks)


def test_files_of_the_store_that_are_none_are_passed_over(tmp_path):
    made().write(store.file_of(made(), tmp_path))
    made(CPU).write(store.file_of(made(CPU), tmp_path))
    (tmp_path / "broken.json").write_text("{")
    assert {one.device.kind for one in store.every(tmp_path)} == {"cuda", "cpu"}
    assert store.file_of(made(), tmp_path).name == "nvidia-h200-580.65-2.13.0.json"


@pytest.mark.parametrize(("count", "share"), [(1, 0.5), (8, 0.5), (9, 0.08), (20, 0.18)])
def test_a_class_covers_nine_of_ten_sources_or_takes_the_range_of_all_where_they_are_few(
    count, share
):
    """Nine are the fewest that can support nine of ten; of twenty it is the nineteenth."""
    few = [uncertainty.Residual("sharded", f"m{n}", 0.01 * n) for n in range(count)]
    all_of_them = [*few, *(uncertainty.Residual("one GPU", f"x{n}", 0.5) for n in range(20))]
    found = uncertainty.share_of("sharded", all_of_them)
    assert (found.pooled, found.sources, found.share) == (count < 9, count, share)
    assert uncertainty.share_of("sharded", few[:3]).share == 0.01 * min(2, count - 1)


# ---- a CPU, planned and measured ----

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

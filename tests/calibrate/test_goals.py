"""The numbers that a GPU must show, judged on made measurements."""

from __future__ import annotations

import dataclasses

import pytest

from harness.planner.calibrate.table import GOALS, judged, times
from tests.made.calibrations import CPU, GIB, made, row, rows

GOOD = [
    row("single+bf16", 0.5, 0.4, run=[102, 100], reserved=[105, 100], precision="bfloat16",
        flops_per_second=450e12),
    row("zero2+bf16", 0.5, 0.4, world=8, run=[96, 100], reserved=[95, 100]),
    row("single+bf16_pure", 1.0, 1.0, global_batch=128, needs_bytes=6 * GIB, run=[100, 100]),
]  # fmt: skip


def words(rows, meter=0.004) -> list[str]:
    return [goal.word for goal in judged(made(rows=rows), meter)]


def test_all_are_met_by_a_card_that_meets_them():
    assert words(GOOD) == ["met"] * len(GOALS) == ["met"] * 6


MISSES = {
    "one gpu": (0, 0, {"run": [104, 100]}),
    "sharded": (1, 1, {"run": [94, 100]}),
    "reserved": (2, 0, {"reserved": [111, 100]}),
    "peak": (3, 0, {"flops_per_second": 430e12}),
    "slow": (4, 2, {"step_seconds": 1.3}),
    "large": (4, 2, {"needs_bytes": 8 * GIB}),
}


@pytest.mark.parametrize("case", MISSES)
def test_each_is_missed_by_its_own_number_alone(case):
    place, changed, fields = MISSES[case]
    rows = [*GOOD]
    rows[changed] = dataclasses.replace(rows[changed], **fields)
    assert words(rows) == ["not met" if i == place else "met" for i in range(6)]


def test_a_meter_that_costs_is_said():
    assert words(GOOD, 0.02)[-1] == "not met" and words(GOOD, None)[-1] == "unmeasured"


def test_what_was_not_measured_is_neither():
    assert words([], None) == ["unmeasured"] * 6
    without = judged(made(CPU, rows=GOOD), 0.001)
    assert {goal.word for goal in without} == {"unmeasured"}
    assert {goal.measured for goal in without} == {"no GPU was measured"}


def test_a_small_model_meets_no_goal_of_the_large_one():
    small = [dataclasses.replace(one, model="DiT-S/4") for one in GOOD]
    assert words(small)[3:5] == ["unmeasured"] * 2


def test_the_low_batch_is_judged_by_the_quickest_that_fits():
    quick = dataclasses.replace(GOOD[2], needs_bytes=9 * GIB, step_seconds=0.5)
    found = judged(made(rows=[*GOOD, quick]))[4]
    assert found.met and found.measured.startswith("6.00 GiB at 1.00 steps/s")


def test_a_factor_that_no_card_has_is_said():
    assert "waited for the host" in times(made(rows=rows(factor=6.0))).note
    assert "waited for the host" not in times(made(rows=rows(factor=1.2))).note

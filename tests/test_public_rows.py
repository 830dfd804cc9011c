"""What others measured on GPUs (docs/public-rows.yaml), beside what is predicted of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from docs.make import public_rows
from harness import ROOT
from harness.planner import uncertainty

ROWS = [row for row in public_rows.rows() if row.get("test")]
NEAR = {"reserved": 0.03, "between": 0.005}
ANEW = """
import json, sys
from docs.make.predict_rows import in_forks, predicted, rows
json.dump(in_forks(predicted, [row for row in rows() if row.get("test")]), sys.stdout)
"""


def test_the_ranges_of_plans_are_made_from_the_rows():
    assert list(uncertainty.rows()) == public_rows.residuals()


def test_the_range_of_all_other_models_covers_nine_of_ten_rows_of_memory():
    (_, errors, inside), _ = public_rows.memory()
    assert len(errors) >= 40 and inside >= 0.9 * len(errors)
    assert sum(abs(error) <= 0.05 for error in errors) < 0.9 * len(errors), "the control"


def test_the_range_of_times_covers_nine_of_ten():
    errors, covered = zip(*public_rows.times(), strict=True)
    assert len(errors) >= 90 and sum(covered) >= 0.9 * len(errors)
    assert sum(error <= 0.15 for error in errors) < 0.8 * len(errors), "the control"


def test_no_range_is_made_from_a_whole_run_or_a_near_recipe():
    """The control: such rows are there, and would count among the residuals."""
    memory = [row for row in public_rows.rows() if public_rows.figure(row)]
    plain = [row for row in memory if public_rows.is_plain(row)]
    assert len(memory) > len(plain) > len(public_rows.residuals())
    assert not any("near" in row or "figure" in row for row in plain)


@pytest.mark.parametrize("count", [1, 8, 9, 19])
def test_a_class_of_few_models_takes_the_range_of_all(count):
    """Nine models are the fewest that can support nine of ten."""
    few = [uncertainty.Residual("sharded", f"m{n}", 0.01 * n) for n in range(count)]
    all_of_them = [*few, *(uncertainty.Residual("one GPU", f"x{n}", 0.5) for n in range(20))]
    found = uncertainty.share_of("sharded", all_of_them)
    assert found.pooled == (count < 9) and found.models == count
    assert found.share == (0.5 if count < 9 else 0.08 if count == 9 else 0.17)


@pytest.fixture(scope="module")
def found() -> list[dict]:
    line = [sys.executable, "-c", ANEW]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.nightly
@pytest.mark.parametrize("index", range(len(ROWS)), ids=lambda i: ROWS[i]["name"])
def test_a_public_row_is_predicted_as_it_was_and_near_its_measurement(index, found):
    row, got = ROWS[index], found[index]
    for name in set(row["test"]) & set(NEAR):
        assert got[name] == pytest.approx(row[name], rel=NEAR[name]), name
    assert got["reserved"] == pytest.approx(row["predicted"]["reserved"], rel=1e-3)
    for card, seconds in got["seconds"].items():
        assert seconds == pytest.approx(row["predicted"]["seconds"][card], rel=1e-3), card


@pytest.mark.nightly
def test_the_rows_tell_one_model_from_another(found):
    """The control: what is predicted of another row is far off."""
    between = [got["between"] for got in found]
    for row, other in zip(ROWS, between[1:] + between[:1], strict=True):
        if "between" in row:
            assert abs(other / row["between"] - 1) > 5 * NEAR["between"]

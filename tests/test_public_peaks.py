"""What others measured on GPUs, predicted without calibration (docs/public-peaks.yaml)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from harness import ROOT

ROWS = [r for r in yaml.safe_load((ROOT / "docs/public-peaks.yaml").read_text()) if r.get("test")]
NEAR = {"reserved": 0.03, "between": 0.005}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("public") / "found.json"
    words = [sys.executable, "-m", "tests.made.published", "--test", str(out)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("index", range(len(ROWS)), ids=lambda i: ROWS[i]["name"])
def test_a_public_row_is_predicted(index, found):
    row, got = ROWS[index], found[index]
    assert "why" not in got, got
    for name in row["test"]:
        assert got[name] == pytest.approx(row[name], rel=NEAR[name]), name


def test_the_rows_tell_one_model_from_another(found):
    """The control: what is predicted of another row is far off."""
    between = [got["between"] for got in found]
    for row, other in zip(ROWS, between[1:] + between[:1], strict=True):
        if "between" in row:
            assert abs(other / row["between"] - 1) > 5 * NEAR["between"]

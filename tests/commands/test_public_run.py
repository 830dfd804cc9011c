"""A public model of its published width through ``run``, as a user starts it, to its report."""

from __future__ import annotations

import pytest

from harness import cli
from harness.result import Status, load

pytestmark = pytest.mark.thorough

WIDTH = 1152  # PixArt-Sigma's: 16 heads of 72 units
RECIPE = "single+lora:rank=4+checkpoint"
ASKED = [
    *("run", "--model", "pixart-sigma", "--set", "num_layers=2", "--resolution", "128"),
    *("--text", "16", "--recipes", RECIPE, "--device", "cpu"),
    *("--global-batch", "1", "--warmup", "1", "--steps", "1", "--ema", "0"),
    *("--noise-floor", "1", "--no-predictions"),
]


def test_a_public_model_of_its_own_width_runs_to_a_report(tmp_path, capsys):
    assert cli.main([*ASKED, "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    (row,) = [load(path) for path in tmp_path.glob("runs/*/result.json")]
    assert row.status is Status.OK and [check for check in row.audit if not check.ok] == []
    assert row.launch.exit_code is not None and row.launch.tree_peak_bytes > 2**26
    assert {"lora", "checkpoint"} <= set(row.evidence)
    held = row.ranks[0].categories
    # Two blocks: attention and text's (4 d^2 each), MLP (8 d^2); texts of 4096 to d and d^2.
    assert held.parameters > 4 * (2 * 16 + 5) * WIDTH**2 > 50 * held.optimizer_state
    report = (tmp_path / "report.md").read_text()
    assert "pixart-sigma" in report and RECIPE in report
    assert (tmp_path / "report.html").exists()

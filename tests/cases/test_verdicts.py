"""Verdicts of a trainer's files on made-up memory: what is not predicted stands beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import cli
from harness.planner import pool, verdict
from harness.planner.verdict import Uncounted
from harness.system import cards
from tests.made.predictions import asked, prediction

FILES = Path(__file__).parent / "trainers"


@pytest.fixture
def sizes(monkeypatch):
    """Predictions of as many GiB as the list's one item."""
    found = [1.0]
    monkeypatch.setattr(
        pool, "predict_all", lambda rows, folder, **more: [prediction(found[0]) for _ in rows]
    )
    monkeypatch.setenv("COLUMNS", "400")
    return found


@pytest.mark.parametrize(
    ("size", "errs", "sure"),
    [
        *((size, errs, False) for size, errs in ((1, "more"), (1, ""), (90, "less"), (90, ""))),
        *((size, errs, True) for size, errs in ((1, "less"), (90, "more"))),
    ],
)
def test_a_verdict_is_sure_only_if_what_is_left_out_cannot_turn_it(size, errs, sure):
    fit = verdict.judge(asked("ddp"), prediction(size), cards.find("RTX-4090"))
    assert fit.verdict == ("fits" if size == 1 else "no")
    found = verdict.with_uncounted(fit, [Uncounted("a setting", "a reason", errs)])
    assert found.verdict == (fit.verdict if sure else "tight")


@pytest.mark.parametrize("more", [[], ["--check"]])
def test_layers_that_are_offloaded_leave_the_verdict_open(more, sizes, capsys):
    sizes[0] = 20.0
    words = ["plan", "--from", str(FILES / "layer-offloading.yaml"), "--gpu", "RTX-3060"]
    code = cli.main([*words, *more])
    lines = capsys.readouterr().out.splitlines()
    (said,) = [line for line in lines if "may fit: " in line]
    assert "about 20.7" in said and "layer_offloading" in said and "not counted" in said
    assert code == (1 if more else 0)

"""Rows that ran on an H200: their page, their times and their memory."""

from __future__ import annotations

import statistics

import pytest

from harness.planner.calibration.record import load
from harness.planner.speed.rates import HOPPER_STREAMING
from tests.made import h100, h200
from tests.made.pages import tables


def test_the_page_has_the_rows():
    on_page, found = tables(h200.PAGE.read_text(encoding="utf-8")), h200.steps()
    for made in (h200.summary(found), h200.table(found), h100.summary(h200.FOLDER)):
        assert "\n".join(made) + "\n" in on_page


def test_typical_streaming_on_hopper_is_what_steps_show():
    shares = [share for _, share in h200.streaming(h200.steps())]
    told = [min(shares), max(shares), statistics.median(shares)]
    assert len(shares) == 7 and told == pytest.approx([0.40, 0.72, 0.51], abs=0.005)
    assert abs(HOPPER_STREAMING - told[2]) < 0.05


def test_nine_of_ten_times_are_within_the_range_by_the_card_s_rates():
    within = [one.covered() for one in h200.steps()]
    assert len(within) == 26
    typical, rates, fitted = (sum(column) for column in zip(*within, strict=True))
    assert typical >= 0.9 * 26 and rates >= 0.9 * 26 and fitted >= 0.9 * 26


def test_memory_is_within_the_goals_but_for_flux():
    """Flux's norms are predicted by their parts; a GPU computes each in one kernel."""
    for row, pair in h100.pairs(h200.FOLDER):
        limit = 0.07 if row.spec.model == "flux-dev" else 0.03
        assert abs(pair.run_predicted / pair.run_measured - 1) < limit, row.spec.recipe
        assert abs(pair.reserved_predicted / pair.reserved_measured - 1) < 0.10, row.spec.recipe


def test_the_norms_explain_all_that_flux_is_predicted_too_high():
    """Two tensors of 4,608 tokens, 3,072 wide, in 16 bits, in each of its 19 and 38 blocks."""
    norms = 2 * 4608 * 3072 * 2
    blocks = {"": 19 + 38, "num_layers=5,num_single_layers=10": 15}
    for row, pair in h100.pairs(h200.FOLDER):
        if row.spec.model == "flux-dev":
            left = pair.step_predicted - pair.step_measured - blocks[row.spec.set] * norms
            assert abs(left) < 2**20, row.spec.set


def test_what_the_page_says_of_goals_is_what_the_rows_say():
    page, steps = h200.PAGE.read_text(encoding="utf-8"), h200.steps()
    ceilings = load(h200.CALIBRATION).ceilings
    shares = [
        sorted((one.row.flops_per_step or 0) / one.seconds / rates["bfloat16"] for one in steps)[
            -2:
        ]
        for rates in (ceilings.products, ceilings.model_products)
    ]
    fast, shapes = ([f"{100 * share:.0f}" for share in reversed(some)] for some in shares)
    assert f"reaches {fast[0]} % of the card" in page and f"reaches {fast[1]} %." in page
    assert f"they reach {shapes[0]} and {shapes[1]} %" in page
    (low,) = (1 / one.seconds for one in steps if one.row.spec.global_batch == 128
              and "accumulate" in one.row.spec.recipe)  # fmt: skip
    assert f"makes {low:.2f} steps a second" in page

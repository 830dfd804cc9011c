"""Rows that ran on an H200: their page, their times and their memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

from harness import ROOT
from harness.planner.calibrate.stations import kernels
from harness.planner.calibration.record import Ceilings, load
from harness.planner.speed import rates, roofline
from harness.system import cards
from tests.made import h100, h200
from tests.made.pages import tables


def test_the_page_has_the_rows():
    on_page, found = tables(h200.PAGE.read_text(encoding="utf-8")), h200.steps()
    for made in (h200.summary(found), h200.table(found), h100.summary(h200.FOLDER)):
        assert "\n".join(made) + "\n" in on_page


def means(of: Callable[[Ceilings], dict]) -> dict:
    """Return key -> mean over an H100 and an H200 of what they reached."""
    found = [
        of(load(file).ceilings) for file in (h100.FOLDER / "calibration.json", h200.CALIBRATION)
    ]
    return {key: statistics.mean(some[key] for some in found if key in some) for key in found[1]}


def test_typical_shares_of_hopper_are_the_means_of_two_cards():
    peaks = dict(cards.find("H200-141GB").peaks)
    assert peaks == dict(cards.find("H100-80GB").peaks)
    ends = [means(of) for of in (lambda one: one.model_products, lambda one: one.products)]
    for kind, typical in rates.HOPPER_PRODUCTS.items():
        shares = [end[kind] / peaks[kind] for end in ends if kind in end]
        assert [round(share, 2) for share in shares] == list(typical[-len(shares) :]), kind
    slender, wide = rates.HOPPER_PRODUCTS["bfloat16"]
    low, high = rates.HOPPER_PRODUCTS["float8"]  # measured in squares alone
    assert low == pytest.approx(high * slender / wide, abs=0.01)

    def taken(one: Ceilings) -> dict:
        """By type and tokens, of the kernel that torch takes; the mean of the head widths."""
        some: dict = {}
        for a in one.attention:
            if a.kernel == ("efficient" if a.dtype == "float32" else "cudnn"):
                some.setdefault((a.dtype, a.tokens), []).append(a.rate)
        return {key: statistics.mean(known) for key, known in some.items()}

    reached = means(taken)
    for kind, known in rates.HOPPER_ATTENTION.items():
        assert [t for k, t in sorted(reached) if k == kind] == [tokens for tokens, _ in known]
        for tokens, share in known:
            assert share == round(reached[kind, tokens] / peaks[kind], 2), (kind, tokens)


def test_the_page_of_predictions_has_the_typical_shares():
    page = (ROOT / "docs/explanation/predictions.md").read_text(encoding="utf-8")
    low, high = (f"{100 * share:.0f} %" for share in rates.HOPPER_PRODUCTS["bfloat16"])
    assert f"| {low} in the shapes of DiT-XL's blocks, {high} in large squares" in page
    told = [f"{100 * low:.0f} to {100 * high:.0f} %" for low, high in
            (rates.HOPPER_PRODUCTS[kind] for kind in ("tf32", "float32", "float8"))]  # fmt: skip
    assert f"| TF32, float32, float8 | {', '.join(told)} | {100 * rates.PRODUCTS:.0f} % |" in page
    told = [
        f"{100 * share:.0f} % over {tokens:,}"
        for tokens, share in rates.HOPPER_ATTENTION["bfloat16"]
    ]
    told[0] += " tokens"
    assert f"| {', '.join(told)} | {100 * rates.ATTENTION:.0f} % |" in page
    ends = (rates.HOPPER_STREAMING, rates.STREAMING)
    assert "| {:.0f} % | {:.0f} % |".format(*(100 * one for one in ends)) in page


def test_shapes_of_a_dit_s_blocks_are_as_deep_as_typical_rates_say():
    tokens, width = kernels.BLOCK["cuda"]
    sides = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    depths = [1 / (1 / tokens + 1 / one + 1 / other) for one, other in sides]
    assert statistics.mean(depths) == pytest.approx(rates.SLENDER, rel=0.01)
    assert kernels.SIDES["cuda"][0] // 3 == rates.WIDE


def test_what_the_page_says_of_the_host_is_what_the_rows_say():
    """Rows whose time the host decides, by microseconds an operation."""
    page, found = h200.PAGE.read_text(encoding="utf-8"), {}
    for one in h200.steps():
        if one.typical.overhead:
            kind = roofline.again(one.work) or ("lora" if "+lora" in one.row.spec.recipe else 0)
            each = 1e6 * one.seconds / roofline.issued(one.work)
            found.setdefault(kind, []).append(round(each))
    ends = {kind: (min(some), max(some)) for kind, some in found.items()}
    assert "in {} to {} microseconds** without".format(*ends[0]) in page
    assert f"and in {ends['lora'][0]} with a LoRA" in page
    assert "it took {} to {}, and".format(*ends[1]) in page and f"and {ends[0.5][0]} with" in page


def test_typical_streaming_on_hopper_is_what_steps_show():
    shares = [share for _, share in h200.streaming(h200.steps())]
    told = [min(shares), max(shares), statistics.median(shares)]
    assert len(shares) == 7 and told == pytest.approx([0.40, 0.72, 0.51], abs=0.005)
    assert abs(rates.HOPPER_STREAMING - told[2]) < 0.05


def test_nine_of_ten_times_are_within_the_range_by_the_card_s_rates():
    within = [one.covered() for one in h200.steps()]
    assert len(within) == 26
    typical, by_rates, fitted = (sum(column) for column in zip(*within, strict=True))
    assert typical >= 0.9 * 26 and by_rates >= 0.9 * 26 and fitted >= 0.9 * 26


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
        sorted((one.row.flops_per_step or 0) / one.seconds / reached["bfloat16"] for one in steps)[
            -2:
        ]
        for reached in (ceilings.products, ceilings.model_products)
    ]
    fast, shapes = ([f"{100 * share:.0f}" for share in reversed(some)] for some in shares)
    assert f"reaches {fast[0]} % of the card" in page and f"reaches {fast[1]} %." in page
    assert f"they reach {shapes[0]} and {shapes[1]} %" in page
    (low,) = (1 / one.seconds for one in steps if one.row.spec.global_batch == 128
              and "accumulate" in one.row.spec.recipe)  # fmt: skip
    assert f"makes {low:.2f} steps a second" in page

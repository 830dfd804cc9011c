"""What others measured on GPUs (docs/public-rows.yaml), beside what is predicted of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from docs.make import coverage, public_rows
from harness import ROOT
from harness.planner import pool, uncertainty
from harness.planner.plan.tracing import known
from harness.resolve import resolve
from harness.spec import Spec
from tests.refill import asked

ROWS = [row for row in public_rows.rows() if row.get("test")]
NEAR = {"reserved": 0.03, "between": 0.005}
ANEW = """
import json, sys
from docs.make.predict_rows import anew, rows
json.dump(anew([row for row in rows() if row.get("test")]), sys.stdout)
"""


def test_the_ranges_of_plans_are_made_from_the_rows():
    assert list(uncertainty.rows()) == public_rows.residuals()
    assert list(uncertainty.times()) == public_rows.timed()


@pytest.mark.parametrize(("held", "rows", "sources"), [("memory", 60, 4), ("times", 90, 10)])
def test_the_range_of_all_other_sources_covers_nine_of_ten(held, rows, sources):
    """Of the rows, and of the sources if each counts once; README states the figures."""
    found = getattr(coverage, held)()
    assert len(found) >= rows and len(coverage.by_source(found)) >= sources
    inside = sum(one.inside for one in found)
    assert inside >= 0.9 * len(found) and round(coverage.mean(found), 2) >= 0.9
    assert f"{inside} of {len(found)}" in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize(("blocks", "card"), [(14, "RTX-4090"), (43, "RTX-3060")])
def test_what_a_trainer_says_of_streamed_weights_that_train_is_not_denied(blocks, card):
    """sd-scripts' README at ddfb38e5: all weights of Flux "will work with 24GB VRAM GPUs" with 8 of
    its blocks swapped (12 of the model's 57), and "may be working with 12GB" with 28 (42)."""
    swap = f"block_swap:blocks={blocks}+checkpoint"
    recipe = f"single+bf16_pure+{swap}+adafactor:write=stochastic+optimizer_in_backward"
    plan = asked(f"--model flux-dev --gpus 1 --gpu {card} --recipes {recipe}")
    fit = known(plan.resolved[0], plan.gpu, recorded=True)
    assert fit.may_fit and fit.need_bytes > 0.9 * fit.gpu.memory_bytes


OPENTAU = [("cosmos3", "zero2", 1, ".1f"), ("pi07", "zero2_bf16", 8, ".2f")]
"""Model and settings in docs/examples, samples a GPU and digits of rows on the accuracy page."""


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "settings", "samples", "digits"), OPENTAU)
def test_a_row_of_opentau_is_predicted_as_the_page_says(model, settings, samples, digits, tmp_path):
    """OpenTau's pull requests 429 and 273, in GB of 10^9: allocated."""
    given = {"data": "synthetic", "objective": "own", "device": "cuda", "ema": 0.0, "beta2": 0.95}
    recipe = f"@docs/examples/opentau_{settings}.json+bf16"
    spec = Spec(model=f"docs/examples/{model}.py:make", recipe=recipe, grad_clip=10.0, processes=8,
                global_batch=8 * samples, **given)  # fmt: skip
    (found,) = pool.predict_all([resolve(spec)], tmp_path, jobs=1)
    page = (ROOT / "docs/explanation/accuracy.md").read_text("utf-8")
    (line,) = (one for one in page.splitlines() if one.startswith(f"| ZeRO-2, {samples} |"))
    assert f" {found.allocated / 1e9:{digits}} (" in line


def test_a_source_is_left_out_with_its_trainer_and_its_kind_of_card(monkeypatch):
    """The control: with its own rows in it, a range of time covers what it does not without."""
    known = public_rows.timed()
    own = [one for one in known if one.source == "unslothai/unsloth"]
    assert own and not any(o.inside for o in coverage.times() if o.source == own[0].source)
    reach = uncertainty.reach()
    assert all(reach.low <= one.ratio <= reach.high for one in own)


def test_a_range_of_time_is_longer_upwards_and_counts_each_source_once():
    many = [uncertainty.Timed("one", "a", 1 + 0.01 * n) for n in range(100)]
    others = [uncertainty.Timed(f"s{n}", "b", 1.0 + 0.1 * n) for n in range(9)]
    found = uncertainty.reach_of([*many, *others])
    assert found.sources == 10 and found.low == 1.0
    assert found.high == pytest.approx(1.89), "a tenth of one source may be longer"
    few = uncertainty.reach_of(others)
    assert (few.low, few.high) == (1.0, 1.8), "nine sources give their extreme rows"
    kept = uncertainty.reach()
    assert kept.high - 1 > 1 - kept.low > 0


def test_no_range_is_made_from_a_whole_run_or_a_near_recipe():
    """The control: such rows are there, and would count among the residuals."""
    memory = [row for row in public_rows.rows() if public_rows.figure(row)]
    plain = [row for row in memory if public_rows.is_plain(row)]
    assert len(memory) > len(plain) == len(public_rows.residuals())
    assert not any("near" in row or "figure" in row for row in plain)


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

"""The largest batch: the search on made-up memory, its words, and one for real."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
from conftest import in_fork
from rich.console import Console

from harness.planner import overhead, search
from harness.planner.plan.advice import print_largest
from harness.planner.plan.command import Asked
from harness.planner.verdict import Fit, judge
from harness.prediction import Prediction
from harness.resolve import Resolved
from harness.system import cards
from tests.made.predictions import GIB, asked, prediction

pytestmark = pytest.mark.usefixtures("sure")

CARD = cards.of_size(24 * GIB)
BESIDE = overhead.fixed_overhead(CARD, 8, "zero2").total / GIB


@pytest.fixture
def world():
    """``world(need, seek) -> (answer, sizes tried)``; ``need`` is of a row: GiB or a prediction."""

    def go(need: Callable[[Resolved], float | Prediction], sizes=search.batches, told=()):
        tried: list[int] = []

        def ask(rows: list[Resolved]) -> list[Fit]:
            tried.extend(row.micro_batch for row in rows)
            found = [need(row) for row in rows]
            made = [f if isinstance(f, Prediction) else prediction(f) for f in found]
            return [judge(row, one, CARD) for row, one in zip(rows, made, strict=True)]

        rows = [asked("zero2")]
        return search.search(rows, sizes(rows), CARD, ask, told=told)[0], tried

    return go


def said(one: search.Largest, what: str = "batch") -> str:
    """What a terminal shows of it, in one line."""
    console = Console(file=io.StringIO(), width=200)
    print_largest([one], what, Asked(resolved=[asked("zero2")], refused=[], gpu=CARD), console)
    return " ".join(console.file.getvalue().split())


# GiB of a micro batch: in proportion; flat at first, where the optimizer's peak is the higher, then
# steep; and in lumps, as an allocator reserves.


def straight(batch: int) -> float:
    return 2 + 0.5 * batch


def bent(batch: int) -> float:
    return max(6.0, 1 + 0.09 * batch + 2e-4 * batch**2)


def stepped(batch: int) -> float:
    return 2 + batch // 7 * 0.35


NEEDS = {"straight": straight, "bent": bent, "stepped": stepped}


@pytest.mark.parametrize("name", NEEDS)
def test_the_largest_batch_and_its_neighbour_are_found_in_few_tries(name, world):
    need = NEEDS[name]
    true = max(b for b in range(1, 1000) if need(b) + BESIDE <= 24)
    one, tried = world(lambda row: need(row.micro_batch))
    assert one.exact and one.fits.resolved.micro_batch == true
    assert one.over.resolved.micro_batch == true + 1
    assert one.tried == len(tried) <= search.TRIES and len(set(tried)) == len(tried)
    assert f"micro batch {true} " in said(one) and f"micro batch {true + 1}" in said(one)


def test_a_bracket_that_stays_open_is_said_to_be_one(world, monkeypatch):
    monkeypatch.setattr(search, "TRIES", 4)
    one, _ = world(lambda row: bent(row.micro_batch))
    assert not one.exact and one.tried == 4
    low, high = one.fits.resolved.micro_batch, one.over.resolved.micro_batch
    assert f"between micro batch {low} and micro batch {high}, after 4 predictions" in said(one)
    monkeypatch.setattr(search, "TRIES", 3)
    one, _ = world(lambda row: bent(row.micro_batch))
    low = one.fits.resolved.micro_batch
    assert not one.exact and one.over is None
    assert f"micro batch {low} or more: after 3 predictions" in said(one)


def test_the_ends_of_the_search_are_said(world):
    none, tried = world(lambda row: 30.0)
    assert none.fits is None and tried == [1] and "not even micro batch 1 fits" in said(none)
    all_of_them, _ = world(lambda row: 1.0)
    assert all_of_them.over is None and all_of_them.exact
    assert f"micro batch {search.MOST} or more: the search ends there" in said(all_of_them)


def test_what_cannot_be_predicted_says_why_and_keeps_what_is_known(world):
    lost = Prediction(recipe="zero2", device="cuda", method="none", reason="hooks")
    one, _ = world(lambda row: straight(row.micro_batch) if row.micro_batch < 10 else lost)
    assert one.fits.resolved.micro_batch == 5 and not one.exact
    assert "could not be predicted: hooks" in said(one) and "or more" not in said(one)


def test_a_tight_fit_is_marked(world):
    one, _ = world(lambda row: 2.0 if row.micro_batch == 1 else 24.0)
    assert "micro batch 2 (tight on the GPU)" in said(one) and "micro batch 2 may fit" in said(one)


def test_a_real_search_ends_between_two_real_predictions(tmp_path):
    """The command itself, in a process that loads its libraries once; a plan of each neighbour, of
    predictions made anew, then says the same of it."""
    # The batch asked for does not divide, and is not what is sought.
    words = ["--model", "DiT-S/2:depth=2", "--gpus", "2", "--gpu-memory", "1930MiB"]
    words += ["--recipes", "ddp+accumulate:steps=2", "--global-batch", "3"]
    (tmp_path / "asked.json").write_text(json.dumps({"batch": words}))
    in_fork(tmp_path, "tests.children.searched", tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())["batch"]
    row = found["searched"]
    low, high = row["fits"], row["over"]
    assert row["exact"] and high["micro_batch"] == low["micro_batch"] + 1
    assert low["method"] == high["method"] == "trace" and row["tried"] <= search.TRIES
    assert low["need_high_bytes"] <= 1930 * 2**20 < high["need_high_bytes"]
    shown = row["said"]
    assert f"micro batch {low['micro_batch']} " in shown and shown.startswith("predicting")
    for side, one in zip((low, high), found["direct"], strict=True):
        assert one["need_bytes"] == side["need_bytes"] and one["verdict"] == side["verdict"]

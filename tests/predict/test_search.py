"""The largest batch, resolution, number of frames and rank: on made-up memory, and one for real."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable

import pytest
from conftest import launchable
from rich.console import Console

from harness import cli
from harness.planner import edits, overhead, search
from harness.planner.plan.advice import print_largest
from harness.planner.plan.command import Asked
from harness.planner.verdict import Fit, judge
from harness.resolve import Resolved, resolve
from harness.system import cards
from strategies.base import Slot
from tests.made.predictions import FLUX, GIB, asked, made_up, prediction

pytestmark = pytest.mark.usefixtures("sure")

CARD = cards.of_size(24 * GIB)


def largest(
    need: Callable[[Resolved], float], row: Resolved | None = None, what: str = "batch"
) -> tuple[search.Largest, list[Resolved]]:
    """The answer where a row needs so many GiB, and the rows that were tried."""
    tried: list[Resolved] = []

    def ask(rows: list[Resolved]) -> list[Fit]:
        tried.extend(rows)
        return [judge(row, prediction(need(row)), CARD) for row in rows]

    return search.search([row or asked("zero2", global_batch=8)], what, CARD, ask)[0], tried


def said(one: search.Largest, what: str = "batch") -> str:
    """What a terminal shows of it, in one line."""
    console = Console(file=io.StringIO(), width=200)
    print_largest([one], what, Asked(resolved=[asked("zero2")], refused=[], gpu=CARD), console)
    return " ".join(console.file.getvalue().split())


def test_the_ends_of_the_search_are_said():
    none, tried = largest(lambda row: 30.0)
    assert (
        none.fits is None
        and [row.micro_batch for row in tried] == [1]
        and "not even micro batch 1 fits" in said(none)
    )
    all_of_them, _ = largest(lambda row: 1.0)
    assert all_of_them.over is None and all_of_them.exact
    assert f"micro batch {search.MOST} or more: the search ends there" in said(all_of_them)


def test_a_tight_fit_is_marked():
    one, _ = largest(lambda row: 2.0 if row.micro_batch == 1 else 24.0)
    assert "micro batch 2 (tight on the GPU)" in said(one) and "micro batch 2 may fit" in said(one)


# ---- any size ----

VIDEO = dataclasses.replace(FLUX, model="wan2.1-1.3b")


def tokens(row: Resolved) -> int:
    """Elements of one channel of a sample's latent."""
    space = row.subject.space
    return space.frames * space.height * space.width


def by_rank(row: Resolved) -> float:
    return 4 + 0.05 * edits.adapter(row).rank


# GiB of a micro batch: in proportion; flat at first, where the optimizer's peak is the higher, then
# steep; and in lumps, as an allocator reserves.
LADDERS = {
    "batch": lambda row: 2 + 0.5 * row.micro_batch,
    "batch, bent": lambda row: max(6.0, 1 + 0.09 * row.micro_batch + 2e-4 * row.micro_batch**2),
    "batch, in lumps": lambda row: 2 + row.micro_batch // 7 * 0.35,
    "resolution": lambda row: 4 + 4e-5 * tokens(row),
    "frames": lambda row: 4 + 4e-5 * tokens(row),
    "rank": by_rank,
    "rank, in lumps": lambda row: 4 + 0.64 * (edits.adapter(row).rank * 5 // 64),
    "resident": lambda row: 10 + 0.6 * (30 - getattr(row.recipe.in_slot(Slot.SWAP), "blocks", 0)),
}


@pytest.mark.parametrize("name", launchable(LADDERS, [n for n in LADDERS if "batch" in n]))
def test_the_largest_and_its_neighbour_are_found(name):
    need, what = LADDERS[name], name.partition(",")[0]
    row = asked("zero2", global_batch=8) if what == "batch" else resolve(VIDEO)
    one, tried = largest(need, row, what)
    assert one.exact and one.tried == len(tried) <= search.TRIES
    room = 24 - overhead.fixed_overhead(CARD, row.spec.processes, row.launch.sharding).total / GIB
    fits, over = one.fits.resolved, one.over.resolved
    assert need(fits) <= room < need(over)
    if what == "batch":
        assert over.micro_batch == fits.micro_batch + 1
        assert f"micro batch {fits.micro_batch} " in said(one)
    if what in ("resolution", "frames"):
        # What was asked for is tried first, and all else stays as it was.
        assert tokens(tried[0]) == tokens(row)
        sizes = [fields for fields, _ in row.subject.samples_up(what)]
        places = [next(i for i, fields in enumerate(sizes) if fields.items() <= vars(side).items())
                  for side in (fits.spec, over.spec)]  # fmt: skip
        assert places[1] == places[0] + 1
        fixed = "frames" if what == "resolution" else "height"
        assert getattr(fits.subject.space, fixed) == getattr(row.subject.space, fixed)


def test_recipes_without_a_rank_are_named_beside_those_that_have_one(monkeypatch, capsys):
    made_up(monkeypatch, by_rank)
    words = ["plan", "--gpu-memory", "24GiB", "--model", "flux-dev", "--largest", "rank"]
    assert cli.main([*words, "--recipes", "single+bf16", "single+bf16+lora:rank=4"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Largest rank: flux-dev at 1024x1024" in text
    room = 24 - overhead.fixed_overhead(CARD, 1).total / GIB
    assert f"rank {int((room - 4) / 0.05)}" in text
    assert "Encoding needs" in text, "the step is not the run"
    assert "refused single+bf16: single+bf16 has no adapters" in text
    assert cli.main([*words, "--recipes", "single+bf16"]) == 2
    assert "largest is rank: single+bf16 has no adapters" in capsys.readouterr().err

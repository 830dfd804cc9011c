"""The search for a plan's answer, held to all recipes of its lattice, each traced: a small DiT on
one GPU and on several."""

from __future__ import annotations

import dataclasses

import pytest

from harness.planner import pool, verdict
from harness.planner.plan.bounds import (
    Known,
    copies_floor,
    fixed,
    host_floor,
    need_floor,
    time_floor,
)
from harness.planner.plan.fastest import EVEN, NEAR, best_of, common, search
from harness.planner.plan.lattice import Point, lattice
from harness.planner.verdict import Fit
from harness.resolve import Resolved, resolve
from harness.spec import Spec, SpecError
from harness.system import cards
from strategies import parse
from tests.made.predictions import GIB

pytestmark = pytest.mark.nightly

SMALL = Spec(recipe="ddp", model="DiT-S/4:depth=4", data="synthetic:32", device="cuda", ema=0.0)
GPUS = (1, 4)
USUAL = ("bf16+adamw", "bf16_pure+lora:rank=16")
"""Precision and optimizer or adapter of the columns of which every recipe is traced."""
TRACED = 0.8
"""Most of all recipes that the searches on ``SIZES`` trace. On several ranks the host's time, which
is no bound, leaves many open."""
SIZES = (0.6, 0.66, 0.7, 0.74, 0.78, 0.82, 0.86, 0.9, 1.0, 1.2)
"""GiB of made-up cards: from none that fits to all that do."""
ROUNDING = 0.005


def rows_of(gpus: int) -> list[Resolved]:
    spec = dataclasses.replace(SMALL, processes=gpus, global_batch=32 * gpus)

    def row(text: str) -> Resolved:
        found = resolve(dataclasses.replace(spec, recipe=parse(text, ema=False).text))
        if found.refusal:
            raise SpecError(found.refusal)
        return found

    rows = lattice(row, gpus > 1, ("bf16_pure", "bf16"), whole_only=False)
    found = [row for row in rows if not told_by_usual(Point(row))]
    return [row for row in found if gpus == 1 or not told_by_one(Point(row))]


def told_by_usual(one: Point) -> bool:
    """Return True for a part of the blocks' activations in another column than a usual one.

    A bound across columns has the same rule for each such part. All of them are traced in the usual
    columns, and in the others nothing and whole blocks.
    """
    whole = one.share in (0, 1) and one.part == "block" and not one.products
    kept = one.moved and not one.share
    return "+".join(one.column[1:3]) not in USUAL and (kept or not whole)


def told_by_one(one: Point) -> bool:
    """Return True for parts that replicas have as one GPU has them, besides buckets of gradients.

    They are traced on one GPU, and shares and layers of any sharding too, but for one of each.
    """
    replicas = one.sharding == "ddp" and (one.moved or (one.swapped and one.share < 1))
    return replicas or one.share in (0.25, 0.75) or one.part == "attention"


@pytest.fixture(scope="module", params=GPUS)
def traced(request, tmp_path_factory):
    """Every recipe of the lattice, with its prediction."""
    rows = rows_of(request.param)
    found = pool.predict_all(rows, tmp_path_factory.mktemp("traced"), jobs=2)
    return {str(row.recipe): (row, one) for row, one in zip(rows, found, strict=True)}


def judged(traced, gib: float) -> dict[str, Fit]:
    gpu = cards.of_size(int(gib * GIB))
    return {name: verdict.judge(row, one, gpu) for name, (row, one) in traced.items()}


def test_no_bound_exceeds_what_a_recipe_s_own_trace_gives(traced):
    fits = judged(traced, 24)
    known = [Known(fit) for fit in fits.values() if fit.seconds and fit.need_bytes]
    assert len(known) > 0.9 * len(traced)
    for one in known:
        others = [k for k in known if k is not one and k.point.adapted == one.point.adapted]
        floors = [time_floor(one.point, other) for other in others]
        floors.append(copies_floor(one.point, one.fit.gpu))
        assert max(floors) <= (1 + ROUNDING) * one.fit.seconds.total, one.point.label
        needs = [need_floor(one.point, other) for other in others]
        held = one.point.state_bytes + one.point.gradient_bytes
        needs.append(fixed(one.point, one.fit.gpu) + held)
        assert max(needs) <= (1 + ROUNDING) * one.fit.need_bytes, one.point.label
        assert host_floor(one.point, one.fit.gpu) <= one.fit.host_bytes, one.point.label


def test_the_answer_is_the_best_of_all_traced(traced):
    counts = [len(searched(traced, gib)) for gib in SIZES]
    assert sum(counts) < TRACED * len(SIZES) * len(traced), counts


def searched(traced, gib: float) -> list[str]:
    """Hold both answers on a card to the best of all, and return the recipes that were asked."""
    every, asked = judged(traced, gib), []

    def ask(rows: list[Resolved]) -> list[Fit]:
        asked.extend(str(row.recipe) for row in rows)
        return [every[str(row.recipe)] for row in rows]

    gpu = next(iter(every.values())).gpu
    _, proofs = search([row for row, _ in traced.values()], gpu, ask)
    assert len(asked) == len(set(asked))
    for proof in proofs:
        some = [f for f in every.values() if Point(f.resolved).adapted == proof.adapters]
        best, found = best_of(some, common), proof.best
        told = gib, found and found.label, best and best.label
        assert (found and found.verdict) == (best and best.verdict), told
        if best and best.fits:
            most = (1 + 2 * NEAR) * (1 + EVEN) * best.seconds.total
            assert found.seconds.total <= most, told
            assert Point(found.resolved).rank <= Point(best.resolved).rank, told
    return asked

"""Answers of plans held to every recipe of their lattices, each traced.

``python -m tests.made.brute_force --minutes 60`` traces whole lattices of shallow public models,
in an order drawn by a seed, until the time is up. ``--check`` traces nothing. Both then search the
answer of each cell (model, GPUs, card, training) from the traces, and compare it with all recipes.
Traces are cached as those of plans are, so it can be stopped at any time.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from harness.planner import overhead, pool, verdict
from harness.planner.atlas.cells import NOT_KEPT
from harness.planner.atlas.command import CARDS, COUNTS
from harness.planner.plan.candidates import Asked, asked_for
from harness.planner.plan.command import add_arguments
from harness.planner.plan.fastest import EVEN, NEAR, common, search, tie_of, within
from harness.planner.plan.lattice import Point, adapts
from harness.planner.verdict import Fit
from harness.planner.worker import none

MODELS = {
    "pixart-sigma": "num_layers=4",
    "sd3.5-medium": "num_layers=4",
    "flux-dev": "num_layers=2,num_single_layers=2",
    "wan2.1-1.3b": "num_layers=4",
    "wan2.1-14b": "num_layers=4",
    "qwen-image": "num_layers=4",
    "z-image": "n_layers=4",
    "sana-1.6b": "num_layers=4",
    "dit-xl-2": "num_layers=4",
}
"""Public models, and the depth to which they are cut so that a lattice is traced in minutes."""
SEED, CELLS = 20261126, 60
MOST_LOST = 0.15
"""Largest share of a lattice that cannot be traced, of a group that counts."""
TURNS = (1, 8, 1, 4)
"""Numbers of GPUs in turn: a lattice of one GPU takes half of the traces of another."""
SMALL = ("4GiB", "6GiB", "8GiB")
"""Sizes of cards below the atlas's smallest: the cut models are small too."""


class Group(NamedTuple):
    """Cells that share their traces: a model on a number of cards of a kind."""

    model: str
    gpus: int
    cards: tuple[str, ...]

    def asked(self, card: str) -> Asked:
        """Return the plan on one of the cards."""
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        what = "--gpu-memory" if card[:1].isdigit() else "--gpu"
        words = ["--model", self.model, "--set", MODELS[self.model], "--gpus", str(self.gpus)]
        return asked_for(parser.parse_args([*words, what, card]))


class Checked(NamedTuple):
    """A cell: its answer and the fault of it, which is empty if the answer is right."""

    cell: tuple[str, int, str, str]
    answer: str
    predicted: int
    recipes: int
    fault: str


def groups() -> list[Group]:
    """Return all groups, in the order of the seed for each number of GPUs."""
    kinds: dict[str, list[str]] = {}
    for card in (*SMALL, *CARDS):
        kind = overhead.preferred(Group("pixart-sigma", 1, ()).asked(card).gpu.capability)
        kinds.setdefault(kind, []).append(card)
    every = itertools.product(MODELS, COUNTS, map(tuple, kinds.values()))
    found = [Group(*one) for one in every]
    random.Random(SEED).shuffle(found)
    apart = {gpus: [one for one in found if one.gpus == gpus] for gpus in COUNTS}
    return _in_turn(apart)


def _in_turn(apart: dict[int, list[Group]]) -> list[Group]:
    """Return all groups, by the numbers of GPUs in the order of ``TURNS``."""
    found, turns = [], itertools.cycle(TURNS)
    while any(apart.values()):
        found += [left.pop(0) for left in [apart[next(turns)]] if left]
    return found


def trace(group: Group) -> None:
    """Trace every recipe of the group's lattice that has no trace."""
    asked = group.asked(group.cards[0])
    kind = overhead.preferred(asked.gpu.capability)
    pool.predict_all(asked.resolved, pool.default_folder(), kind=kind, jobs=1)


def traced(group: Group) -> dict[str, list[Fit]]:
    """Return card -> every recipe judged by its trace; nothing before the group was traced.

    Few recipes cannot be traced. They are not predicted to the search either.
    """
    found, folder = {}, pool.default_folder()
    for card in group.cards:
        asked = group.asked(card)
        kind = overhead.preferred(asked.gpu.capability)
        made = [pool.cached(row, folder, kind) for row in asked.resolved]
        if made.count(None) > MOST_LOST * len(made):
            return {}
        found[card] = [
            verdict.judge(row, one or none(row, NOT_KEPT), asked.gpu)
            for row, one in zip(asked.resolved, made, strict=True)
        ]
    return found


def checked(group: Group, card: str, every: Sequence[Fit]) -> Iterator[Checked]:
    """Yield the two cells of a card: its searches' answers against every recipe."""
    by_label = {fit.label: fit for fit in every}
    rows = [fit.resolved for fit in every]
    _, proofs = search(rows, every[0].gpu, lambda some: [by_label[str(r.recipe)] for r in some])
    for proof in proofs:
        some = [fit for fit in every if adapts(fit.resolved) == proof.adapters]
        training = "LoRA" if proof.adapters else "all weights"
        answer = f"{proof.best.label} ({proof.best.verdict})" if proof.best else "none fits"
        cell = (group.model, group.gpus, card, training)
        yield Checked(cell, answer, proof.predicted, proof.recipes, fault(proof.best, some))


def fault(answer: Fit | None, every: Sequence[Fit]) -> str:
    """Return how ``every`` recipe contradicts the answer of a search; empty if it is right.

    It is right if it fits and none that fits is faster than the plan's rule of ties allows. If none
    is sure to fit, those count that may. The rule prefers a recipe of trainers within the
    uncertainty of time. Then it prefers the first by rank of those up to ``EVEN`` slower. Of these,
    up to ``tie_of`` slower than the fastest, it prefers the one with the fewest parts.
    """
    timed = [fit for fit in every if fit.seconds and fit.may_fit]
    able = [fit for fit in timed if fit.fits] or timed
    if answer is None or not able:
        return "" if answer is None and not able else f"{able[0].label if able else 'none'} fits"
    if answer.label not in {fit.label for fit in able}:
        return f"{able[0].label} {able[0].verdict}"
    usual = [fit for fit in able if common(fit.resolved)]
    quick = min(able, key=_seconds)
    if usual and within(min(map(_seconds, usual)), _seconds(quick), quick):
        able = usual
    quick, own = min(able, key=_seconds), Point(answer.resolved)
    if _seconds(answer) > (1 + NEAR) * (1 + EVEN) * _seconds(quick):
        return f"faster: {_told(quick)}"
    alike = [_seconds(fit) for fit in able if Point(fit.resolved).rank == own.rank]
    least, tie = min(alike, default=math.inf), tie_of(able)
    for fit in able:
        one, parts = Point(fit.resolved), len(fit.resolved.recipe.strategies)
        even = _seconds(fit) <= (1 + EVEN - NEAR) * _seconds(quick)
        if even and one.rank < own.rank:
            return f"taken first: {_told(fit)}"
        if one.rank == own.rank and _seconds(fit) < (1 - NEAR - tie) * _seconds(answer):
            return f"faster: {_told(fit)}"
        simpler = one.rank == own.rank and parts < len(answer.resolved.recipe.strategies)
        same = (1 - tie + NEAR) * _seconds(fit) <= least
        if simpler and (same or _seconds(fit) <= _seconds(answer)):
            return f"simpler: {_told(fit)}"
    return ""


def _seconds(fit: Fit) -> float:
    return fit.seconds.total


def _told(fit: Fit) -> str:
    return f"{fit.label} {_seconds(fit):.4f} s"


def main() -> None:
    """Trace until the time is up, then print each faulty cell and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--check", action="store_true")
    options, began, found = parser.parse_args(), time.time(), []
    with pool.kept_workers():
        for group in groups():
            if not options.check and time.time() - began < 60 * options.minutes:
                trace(group)
            cells = [one for card, every in traced(group).items()
                     for one in checked(group, card, every)]  # fmt: skip
            if cells:
                minutes, wrong = (time.time() - began) / 60, [one for one in cells if one.fault]
                what = f"{group.model} on {group.gpus} x {group.cards[0]} and others"
                print(f"{what}: {len(cells)} cells, {len(wrong)} wrong, {minutes:.1f} min",
                      *wrong, sep="\n  ", flush=True)  # fmt: skip
            found += cells
    some = random.Random(SEED).sample(found, min(CELLS, len(found)))
    print(counted("all", found), counted("drawn", some), sep="\n")


def counted(name: str, cells: Sequence[Checked]) -> str:
    """Return the counts of some cells as a sentence."""
    wrong, none = (sum(map(bool, kind)) for kind in (
        [one.fault for one in cells], [one.answer == "none fits" for one in cells]))  # fmt: skip
    asked, every = sum(one.predicted for one in cells), sum(one.recipes for one in cells)
    return (
        f"{name}: {len(cells)} cells, {wrong} wrong; in {none} none fits; the searches asked for "
        f"{asked} of {every} predictions"
    )


if __name__ == "__main__":
    main()

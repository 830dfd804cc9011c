"""What an atlas asks of one model, of all its places at once, so that every core has work: the
recipes in the order of their speed, then larger samples of what fits. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from harness.commands.atlas.cells import TRAININGS, Cell, cell_of
from harness.commands.atlas.edge import Edge
from harness.commands.atlas.progress import AtlasProgress
from harness.commands.atlas.sizes import larger
from harness.commands.planning.plan.answer import ADAPTED
from harness.commands.planning.plan.asked import Asked
from harness.commands.planning.plan.asking import judged
from harness.predict.speed.cards import Card
from harness.predict.verdict import Fit
from harness.resolve import Resolved

__all__ = ["Place", "cells_at", "edges_of", "predicted", "usual_cells"]

HOSTED, GATHERED = "host_optimizer", "split_parameters"
USUAL, LARGER = "samples of the usual size", "larger samples"


@dataclass(kw_only=True, eq=False)
class Place:
    """A model on so many of one card: what is asked there, and each fit that is known."""

    model: str
    card: str
    asked: Asked
    fits: list[Fit] = field(default_factory=list)

    def cell(self, training: str) -> Cell:
        """The answer of one training."""
        named = {"model": self.model, "gpus": self.asked.processes, "card": self.card}
        memory = self.asked.gpu.memory_bytes
        return cell_of(self.fits, training, named | {"card_bytes": memory})


Pairs = Sequence[tuple[Place, Resolved]]
Cells = Sequence[tuple[Place, Cell]]
Ask = Callable[[Pairs, str], list[Fit]]
"""A fit of each row at its place, in order; with what they are asked for."""


def cells_at(places: Sequence[Place], ask: Ask, doublings: int) -> list[Cell]:
    """Of each place and training one, in order; samples of what fits are doubled so often."""
    return _grown(usual_cells(places, ask), ask, doublings)


def usual_cells(places: Sequence[Place], ask: Ask) -> Cells:
    """The same with samples of the usual size alone, each with its place."""
    _fill(places, ask)
    return [(place, place.cell(training)) for place in places for training in TRAININGS]


def predicted(pairs: Pairs, why: str, *, jobs: int, progress: AtlasProgress) -> list[Fit]:
    """An ``Ask``: all by one call."""
    asked = [(row, place.asked.gpu) for place, row in pairs]
    return judged(asked, _name, why, jobs=jobs, told=progress)


def _name(row: Resolved, gpu: Card) -> str:
    return f"{row.recipe}  {row.spec.processes} x {gpu.name}"


# ---- recipes, by their speed ----


def _fill(places: Sequence[Place], ask: Ask) -> None:
    """Predict at each place the recipes that may be the fastest that fits."""
    left = {place: list(place.asked.resolved) for place in places}
    while any(left.values()):
        now = [
            (place, row)
            for place, rows in left.items()
            for row in rows
            if not any(_slower(row, other) for other in rows)
        ]
        for (place, row), fit in zip(now, ask(now, USUAL), strict=True):
            place.fits.append(fit)
            left[place].remove(row)
        for place, rows in left.items():
            able = [fit.resolved for fit in place.fits if fit.verdict == "fits"]
            left[place] = [r for r in rows if not any(_slower(r, one) for one in able)]
    for place in places:
        order = [str(row.recipe) for row in place.asked.resolved]
        place.fits.sort(key=lambda fit: order.index(fit.label))


def _slower(row: Resolved, other: Resolved) -> bool:
    """Whether ``row`` is the slower of two that train the same: it does all that ``other`` does and
    more, or steps the optimizer on the host, and ``other`` does not. Of those that gather weights
    only the latter says so: with checkpoints they may gather less often."""
    own, others = row.launch.traits, other.launch.traits
    if (ADAPTED in own) != (ADAPTED in others):
        return False
    if (HOSTED in own) != (HOSTED in others):
        return HOSTED in own
    more = {*map(str, row.recipe.strategies)} > {*map(str, other.recipe.strategies)}
    return more and GATHERED not in own


# ---- larger samples ----


def _grown(cells: Cells, ask: Ask, doublings: int) -> list[Cell]:
    """The cells with the next size that does not fit."""
    edges = edges_of(cells, ask, doublings)
    return [
        dataclasses.replace(cell, beyond=edges[n].too_large) if n in edges else cell
        for n, (_, cell) in enumerate(cells)
    ]


def edges_of(cells: Cells, ask: Ask, doublings: int) -> dict[int, Edge]:
    """Number of a cell -> where its samples begin not to fit, sought where the usual one does."""
    edges = {
        number: Edge(usual=cell.fit, sizes=list(larger(cell.fit.resolved, doublings)))
        for number, (_, cell) in enumerate(cells)
        if cell.fit and cell.fit.fits
    }
    while asked := [(n, at) for n, edge in edges.items() if (at := edge.open) is not None]:
        pairs = [(cells[n][0], edges[n].sizes[at].row) for n, at in asked]
        for (n, at), fit in zip(asked, ask(pairs, LARGER), strict=True):
            edges[n].traced[at] = fit
    return edges

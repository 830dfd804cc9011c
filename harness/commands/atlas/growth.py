"""Larger samples of what fits at each place: the next size that does not. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from harness.commands.atlas.cells import Cell
from harness.commands.atlas.edge import Edge
from harness.commands.atlas.places import Ask, Cells, Place
from harness.commands.atlas.sizes import larger
from harness.commands.atlas.usual import usual_cells
from harness.predict.verdict import Fit, judge
from strategies.base import Slot

__all__ = ["cells_at", "edges_of"]

LARGER = "larger samples"
WHOLE = frozenset({"one_process", "replicas"})
"""Traits of a launch whose ranks hold all that is trained."""


def cells_at(places: Sequence[Place], ask: Ask, doublings: int) -> list[Cell]:
    """Of each place and training one, in order; samples of what fits are doubled so often."""
    cells = usual_cells(places, ask)
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
    alike: dict[Any, list[Edge]] = {}
    for edge in edges.values():
        edge.alike = alike.setdefault(_activations(edge.usual), [])
        edge.alike.append(edge)
    kin: dict[Any, list[Edge]] = {}
    for edge in edges.values():
        edge.kin = kin.setdefault(_recipe(edge.usual), [])
        edge.kin.append(edge)
    same: dict[Any, list[Edge]] = {}
    for number, edge in edges.items():
        same.setdefault(_trace(cells[number][0], edge), []).append(edge)
    turns = {number: _turn(edge) for number, edge in edges.items()}
    for turn in sorted(set(turns.values())):
        # Those before, too: a trace for another card may have opened what was told.
        some = [number for number in edges if turns[number] <= turn]
        while asked := [(n, at) for n in some if (at := edges[n].open) is not None]:
            pairs = [(cells[n][0], edges[n].sizes[at].row) for n, at in asked]
            for (n, at), fit in zip(asked, ask(pairs, LARGER), strict=True):
                for edge in same[_trace(cells[n][0], edges[n])]:
                    edge.traced[at] = judge(fit.resolved, fit.prediction, edge.usual.gpu)
    return edges


def _recipe(fit: Fit) -> Any:
    """What edges share whose need grows by the same: the recipe, on one GPU or on several; where
    each holds all, on any number."""
    spec = fit.resolved.spec
    if WHOLE & fit.resolved.launch.traits:
        return _activations(fit)
    return spec.model, str(fit.resolved.recipe), spec.processes > 1


def _trace(place: Place, edge: Edge) -> Any:
    """What edges share whose sizes are traced once for all of their cards."""
    row = edge.usual.resolved
    return place.kind, row.spec.model, str(row.recipe), row.spec.processes


def _turn(edge: Edge) -> int:
    """The first of each kind of activations, then the others by their number of GPUs: what was
    traced of those before tells of these."""
    return 0 if edge.alike[0] is edge else edge.usual.resolved.spec.processes


def _activations(fit: Fit) -> Any:
    """What a step's activations follow from: the model, and all of the recipe but how it shards;
    there whether weights are computed with in the type that they are stored in."""
    recipe, traits = fit.resolved.recipe, fit.resolved.launch.traits
    rest = [str(part) for part in recipe.strategies if part.slot != Slot.SHARD]
    whole = bool(WHOLE & traits)
    return fit.resolved.spec.model, tuple(rest), whole

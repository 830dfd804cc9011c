"""Rows that an atlas traces: those of each cell's plan, and larger samples until one does not fit.

No torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.planner.atlas.cells import (
    TRAININGS,
    Ask,
    Cell,
    Cells,
    Scenario,
    Size,
    larger,
)
from harness.planner.plan.fastest import Search, run
from harness.planner.verdict import Fit, judge
from harness.resolve import Resolved
from strategies.base import Slot

# ---- next size that does not fit ----
# In each phase of a step, live memory grows linearly with a sample's elements, or faster if another
# instant becomes the peak. A size between two traced ones thus needs at most what the line through
# them gives.
#
# The line decides if its value is clearly above or below the card's memory; otherwise the size is
# traced. Trainings that differ only in their sharding also show the growth of activations.
# ``tests/bench/between_sizes.py`` compares both rules with traces.


ABOVE, BELOW = 0.08, 0.18
"""Margins of a line: the need may be 8 % more or 18 % less than the line gives.

Observed: 6 % more, by the allocator's rounding and unusable memory, and 13 % less
(``tests/bench/between_sizes.py``).
"""
ROUNDED = (0.12, 0.02)
"""Margins if activations were traced at that very size. Observed: 9 % more, and never less."""
KIN = (0.06, 0.06)
"""Margins if the recipe was traced at both sizes on other cards or on more of them.

Observed: 4.4 % more and 4.2 % less.
"""


@dataclass(frozen=True, kw_only=True)
class Told:
    """Upper and lower estimate of a size's need in bytes, with the relative margins of both."""

    most: float
    least: float
    margins: tuple[float, float] = (ABOVE, BELOW)

    def clearly(self, *known: Fit) -> bool | None:
        """Return True if the size fits by its upper estimate, False if the lower one is too large,
        else None.

        The estimates are least needs. The fits in ``known`` give the ratio of the allocator's
        reservation to the least need.
        """
        above, below = self.margins
        has = known[0].capacity_bytes
        if (1 + above) * self.most * max(fit.need_bytes / fit.least_bytes for fit in known) <= has:
            return True
        return False if (1 - below) * self.least > has else None


@dataclass(kw_only=True)
class Edge:
    """Search for the smallest sample that does not fit, for one recipe on one card.

    ``sizes`` grow beyond the ``usual`` sample; ``traced`` has the fits found so far. ``kin``
    are edges of the same recipe on other cards; ``alike`` are edges with the same activations.
    If neither decides, the largest size is traced first, then the sizes that its line leaves
    open.
    """

    usual: Fit
    sizes: Sequence[Size]
    traced: dict[int, Fit] = field(default_factory=dict)
    alike: Sequence[Edge] = field(default=(), repr=False, compare=False)
    kin: Sequence[Edge] = field(default=(), repr=False, compare=False)

    @property
    def open(self) -> int | None:
        """The index of the size to trace next; None if the edge is known."""
        at = self._first
        if at is None or self._fits(at) is not None:
            return None
        return at if self.traced or self.as_alike(at) else len(self.sizes) - 1

    @property
    def too_large(self) -> str:
        """The smallest sample that does not fit, or "above" the largest if all fit.

        Empty if no larger size was requested or could be traced.
        """
        if not self.sizes:
            return ""
        at = self._first
        if at is None:
            return f"above {self.sizes[-1].name}"
        known = at not in self.traced or self.traced[at].verdict != "unknown"
        return self.sizes[at].name if known else ""

    def as_alike(self, at: int) -> Told | None:
        """Estimate a size's need from the growth of the same activations elsewhere; None if
        unknown.

        The growth since the next smaller traced size is added to its peak for the upper
        estimate. For the lower estimate it is added to the memory between steps, because the
        peak may have no activations.
        """
        below = self._below(at)
        small, found = self.traced.get(below, self.usual), self._grown(below, at)
        if found is None or not _straight(small):
            return None
        (lives, unused), margins = found
        most = small.least_bytes + lives + max(0, unused)
        standing = small.least_bytes - small.prediction.least
        least = (
            small.prediction.between + _traced_activations(small) - _kept(small) + lives + standing
        )
        return Told(most=most, least=least, margins=margins)

    def as_kin(self, at: int) -> Told | None:
        """Estimate a size's need from the growth of the same recipe's need on other cards; None if
        unknown.
        """
        below = self._below(at)
        small = self.traced.get(below, self.usual)
        for ends in (other._ends(below, at) for other in self.kin if other is not self):
            if ends and _straight(small):
                need = small.least_bytes + ends[1].least_bytes - ends[0].least_bytes
                return Told(most=need, least=need, margins=KIN)
        return None

    def _ends(self, below: int, at: int) -> tuple[Fit, Fit] | None:
        """Return two sizes if both were traced and their needs lie on a line."""
        small, large = (self.usual if n < 0 else self.traced.get(n) for n in (below, at))
        return (small, large) if small and large and _straight(small, large) else None

    def _grown(self, below: int, at: int) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """Return the growth of activations and of unusable memory between two sizes, with the
        margins.

        The source is a trace of both sizes in an edge of the same activations, or else that
        edge's line.
        """
        for ends in (other._ends(below, at) for other in self.alike if other is not self):
            if ends:
                return _apart(*ends), ROUNDED
        known = [each for other in self.alike if (each := other.growth)]
        if not known:
            return None
        times = self._times(at) - self._times(below)
        return (times * known[0][0], times * known[0][1]), (ABOVE, BELOW)

    @property
    def growth(self) -> tuple[float, float] | None:
        """Bytes of activations and of unusable memory per usual sample's elements, up to the
        largest size.

        None if the largest size was not traced, or if the needs lie on no line.
        """
        last = len(self.sizes) - 1
        if last not in self.traced or not _straight(self.usual, self.traced[last]):
            return None
        lives, unused = _apart(self.usual, self.traced[last])
        times = self._times(last) - 1
        return lives / times, unused / times

    @property
    def _first(self) -> int | None:
        """The index of the first size that is not known to fit."""
        return next((at for at in range(len(self.sizes)) if not self._fits(at)), None)

    def _fits(self, at: int) -> bool | None:
        """Return True if a size fits, False if it does not, None if unknown."""
        if any(fit.fits for place, fit in self.traced.items() if place >= at):
            return True
        if any(not fit.fits for place, fit in self.traced.items() if place <= at):
            return False
        told = self._clearly(self.as_kin(at))
        if told is not None:
            return told
        below, above = self._below(at), min((n for n in self.traced if n > at), default=None)
        if above is None:
            return self._clearly(self.as_alike(at))
        ends = self._times(below), self._times(above)
        share = (self._times(at) - ends[0]) / (ends[1] - ends[0])
        return _told_by_line(self.traced.get(below, self.usual), self.traced[above], share)

    def _below(self, at: int) -> int:
        """Return the index of the next smaller traced size; -1 is the usual one."""
        return max((place for place in self.traced if place < at), default=-1)

    def _times(self, at: int) -> float:
        return 1.0 if at < 0 else self.sizes[at].times

    def _clearly(self, told: Told | None) -> bool | None:
        known = [self.usual, *(fit for fit in self.traced.values() if fit.least_bytes)]
        return told.clearly(*known) if told else None


def _traced_activations(fit: Fit) -> int:
    """Return the most bytes beyond the state in the forward or backward pass."""
    return max(fit.prediction.beyond.get(phase, 0) for phase in ("forward", "backward"))


def _kept(fit: Fit) -> int:
    """Return the bytes of buckets that count both as beyond the state and as kept between steps."""
    found = fit.prediction
    beyond = found.buckets == "workspace" and found.peak is not None
    return found.peak.categories.get("buckets", 0) if beyond else 0


def _apart(small: Fit, large: Fit) -> tuple[int, int]:
    """Return how much two samples differ in activations and in memory that the allocator cannot
    use.
    """
    unused = [one.prediction.least - max(one.prediction.phases.values()) for one in (small, large)]
    return _traced_activations(large) - _traced_activations(small), unused[1] - unused[0]


def _told_by_line(small: Fit, large: Fit, share: float) -> bool | None:
    need = between(small, large, share)
    return None if need is None else Told(most=need, least=need).clearly(small, large)


def _straight(*fits: Fit) -> bool:
    """Return True if the needs lie on a line: all were traced, and no attention stores its scores.

    Attention scores grow with the square of the sample.
    """
    return all(
        fit.least_bytes is not None and fit.prediction.phases
        and "math" not in fit.prediction.attention
        for fit in fits
    )  # fmt: skip


def between(small: Fit, large: Fit, share: float) -> float | None:
    """Return the least need in bytes at this ``share`` of the way between two traced samples.

    None if the needs lie on no line.
    """
    if not _straight(small, large):
        return None
    ends = small.prediction, large.prediction
    least = small.least_bytes, large.least_bytes

    def line(begin: float, end: float) -> float:
        return begin + share * (end - begin)

    phases, others = (one.phases for one in ends)
    lives = max(line(size, others.get(name, size)) for name, size in phases.items())
    beside = (need - max(one.phases.values()) for need, one in zip(least, ends, strict=True))
    return lives + line(*beside)


# ---- usual size ----
# Each scenario has the searches of a plan, which ask for the same rows in the same order. So a cell
# has the answer of its plan. Cards of a kind share the traces.


USUAL = "samples of the usual size"


def usual_cells(places: Sequence[Scenario], ask: Ask) -> Cells:
    """Return a cell for each scenario and training, in order, with its scenario."""
    listed = [(place, row) for place in places if not place.asked.searched
              for row in place.asked.resolved]  # fmt: skip
    for (place, _), fit in zip(listed, ask(listed, USUAL) if listed else (), strict=True):
        place.fits.append(fit)
    placed = {one: place for place in places for one in place.searches}

    def predicted(pairs: Sequence[tuple[Search, Resolved]]) -> list[Fit]:
        return ask([(placed[one], row) for one, row in pairs], USUAL)

    run(list(placed), predicted)
    return [(place, place.cell(training)) for place in places for training in TRAININGS]


LARGER = "larger samples"
WHOLE = frozenset({"one_process", "replicas"})
"""Traits of a launch whose ranks each hold all trained weights."""


def cells_at(places: Sequence[Scenario], ask: Ask, doublings: int) -> list[Cell]:
    """Return a cell for each scenario and training, in order; fitting samples are doubled up to
    ``doublings`` times.
    """
    cells = usual_cells(places, ask)
    edges = edges_of(cells, ask, doublings)
    return [
        dataclasses.replace(cell, beyond=edges[n].too_large) if n in edges else cell
        for n, (_, cell) in enumerate(cells)
    ]


def edges_of(cells: Cells, ask: Ask, doublings: int) -> dict[int, Edge]:
    """Return for each cell that fits, by its index, the search for the next size that does not."""
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
        # Earlier edges again: a trace for another card may have changed an estimate.
        some = [number for number in edges if turns[number] <= turn]
        while asked := [(n, at) for n in some if (at := edges[n].open) is not None]:
            pairs = [(cells[n][0], edges[n].sizes[at].row) for n, at in asked]
            for (n, at), fit in zip(asked, ask(pairs, LARGER), strict=True):
                for edge in same[_trace(cells[n][0], edges[n])]:
                    edge.traced[at] = judge(fit.resolved, fit.prediction, edge.usual.gpu)
    return edges


def _recipe(fit: Fit) -> Any:
    """Return the key of edges whose need grows equally: the recipe, on one GPU or on several.

    If each rank holds all weights, the key ignores the number of GPUs.
    """
    spec = fit.resolved.spec
    if WHOLE & fit.resolved.launch.traits:
        return _activations(fit)
    return spec.model, str(fit.resolved.recipe), spec.processes > 1


def _trace(place: Scenario, edge: Edge) -> Any:
    """Return the key of edges that share the trace of a size across their cards."""
    row = edge.usual.resolved
    return place.kind, row.spec.model, str(row.recipe), row.spec.processes


def _turn(edge: Edge) -> int:
    """Sort key: the first edge of each kind of activations, then the others by their number of
    GPUs.
    """
    return 0 if edge.alike[0] is edge else edge.usual.resolved.spec.processes


def _activations(fit: Fit) -> Any:
    """Return the key of edges with equal activations: the model, and the recipe without its
    sharding.

    A rank that holds all weights computes with them in their stored type, so the key includes
    that.
    """
    recipe, traits = fit.resolved.recipe, fit.resolved.launch.traits
    rest = [str(part) for part in recipe.strategies if part.slot != Slot.SHARD]
    whole = bool(WHOLE & traits)
    return fit.resolved.spec.model, tuple(rest), whole

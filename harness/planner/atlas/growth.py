"""Larger samples of what fits at each place: the next size that does not. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.planner import verdict
from harness.planner.atlas.cells import (
    TRAININGS,
    Ask,
    Cell,
    Cells,
    Scenario,
    Size,
    larger,
    of_training,
)
from harness.planner.plan.answer import ADAPTED
from harness.planner.prediction import Prediction
from harness.planner.verdict import Fit, judge
from harness.resolve import Resolved
from strategies.base import Slot

# ---- edge ----
# The next size of one cell that does not fit: traced, or told by other traces. No torch.
#
# In each phase of a step what lives grows in a straight line with a sample's elements, or more
# steeply where another of its instants becomes the fullest: what lies between two traces needs
# what a line through them says, or less. Such a line decides where it is clearly beyond the card
# or short of it; elsewhere the size is traced. What activations grow by is told, too, by trainings
# that differ in their sharding alone. ``tests/bench/between_sizes.py`` sets both beside traces.


ABOVE, BELOW = 0.08, 0.18
"""By what share of what a line says more may be needed (what the allocator rounds and cannot use
lies on no line: 6 % seen), and less (13 % seen), by ``tests/bench/between_sizes.py``."""
ROUNDED = (0.12, 0.02)
"""Both where no line is between, for activations are known at that very size: 9 % more seen, and
never less."""
KIN = (0.06, 0.06)
"""Both where the same recipe was traced at both sizes on other cards, or more of them: 4.4 % more
seen, and 4.2 % less."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """Bytes that a size needs at the most and at the least, which may both be off: by what shares
    more is needed, and less."""

    most: float
    least: float
    margins: tuple[float, float] = (ABOVE, BELOW)

    def clearly(self, *known: Fit) -> bool | None:
        """Whether it fits, by the upper end of its need; None where nothing tells. These are needs
        at the least, and ``known`` fits of the recipe say by how much more the allocator reserves.
        """
        above, below = self.margins
        has = known[0].capacity_bytes
        if (1 + above) * self.most * max(fit.need_bytes / fit.least_bytes for fit in known) <= has:
            return True
        return False if (1 - below) * self.least > has else None


@dataclass(kw_only=True)
class Edge:
    """Growing samples beyond the ``usual`` one, and the fits of those that were ``traced``: what is
    left open by its ``kin``, the same recipe on other cards, and by those that are ``alike`` in
    their activations; where nothing is known of them, the largest first, then what its line leaves
    open."""

    usual: Fit
    sizes: Sequence[Size]
    traced: dict[int, Fit] = field(default_factory=dict)
    alike: Sequence[Edge] = field(default=(), repr=False, compare=False)
    kin: Sequence[Edge] = field(default=(), repr=False, compare=False)

    @property
    def open(self) -> int | None:
        """The place among the sizes of the one to trace next; None where the edge is known."""
        at = self._first
        if at is None or self._fits(at) is not None:
            return None
        return at if self.traced or self.as_alike(at) else len(self.sizes) - 1

    @property
    def too_large(self) -> str:
        """The smallest sample that does not fit, or beyond what all do; empty where no larger one
        was asked for or could be traced."""
        if not self.sizes:
            return ""
        at = self._first
        if at is None:
            return f"above {self.sizes[-1].name}"
        known = at not in self.traced or self.traced[at].verdict != "unknown"
        return self.sizes[at].name if known else ""

    def as_alike(self, at: int) -> Told | None:
        """What a size needs by how the activations of what is alike grew from the size below that
        was traced here: these are added to its fullest instant; or to what lives between steps, for
        the fullest may be one without them. None where nothing tells."""
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
        """What a size needs by how the need of its kin grew from the size below that was traced
        here; None where nothing tells."""
        below = self._below(at)
        small = self.traced.get(below, self.usual)
        for ends in (other._ends(below, at) for other in self.kin if other is not self):
            if ends and _straight(small):
                need = small.least_bytes + ends[1].least_bytes - ends[0].least_bytes
                return Told(most=need, least=need, margins=KIN)
        return None

    def _ends(self, below: int, at: int) -> tuple[Fit, Fit] | None:
        """Two sizes, where both were traced and lie on a line."""
        small, large = (self.usual if n < 0 else self.traced.get(n) for n in (below, at))
        return (small, large) if small and large and _straight(small, large) else None

    def _grown(self, below: int, at: int) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """By how much activations grow from one size to another, and what the allocator cannot use,
        and how far the need may be off: as both were traced of what is alike, or by its line."""
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
        """Bytes that activations grow by with a usual sample's elements up to the largest size, and
        what the allocator cannot use; None where that was not traced, or lies on no line."""
        last = len(self.sizes) - 1
        if last not in self.traced or not _straight(self.usual, self.traced[last]):
            return None
        lives, unused = _apart(self.usual, self.traced[last])
        times = self._times(last) - 1
        return lives / times, unused / times

    @property
    def _first(self) -> int | None:
        """The first size that is not known to fit."""
        return next((at for at in range(len(self.sizes)) if not self._fits(at)), None)

    def _fits(self, at: int) -> bool | None:
        """Whether a size fits; None where nothing tells."""
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
        """The largest smaller size that was traced; before all sizes the usual one."""
        return max((place for place in self.traced if place < at), default=-1)

    def _times(self, at: int) -> float:
        return 1.0 if at < 0 else self.sizes[at].times

    def _clearly(self, told: Told | None) -> bool | None:
        known = [self.usual, *(fit for fit in self.traced.values() if fit.least_bytes)]
        return told.clearly(*known) if told else None


def _traced_activations(fit: Fit) -> int:
    """The most beyond the state while a sample is computed with."""
    return max(fit.prediction.beyond.get(phase, 0) for phase in ("forward", "backward"))


def _kept(fit: Fit) -> int:
    """Buckets that are beyond the state, and stay between steps: counted twice by both."""
    found = fit.prediction
    beyond = found.buckets == "workspace" and found.peak is not None
    return found.peak.categories.get("buckets", 0) if beyond else 0


def _apart(small: Fit, large: Fit) -> tuple[int, int]:
    """What the activations of a sample take more than another's, and what the allocator cannot use
    more."""
    unused = [one.prediction.least - max(one.prediction.phases.values()) for one in (small, large)]
    return _traced_activations(large) - _traced_activations(small), unused[1] - unused[0]


def _told_by_line(small: Fit, large: Fit, share: float) -> bool | None:
    need = between(small, large, share)
    return None if need is None else Told(most=need, least=need).clearly(small, large)


def _straight(*fits: Fit) -> bool:
    """Whether what they need lies on a line: all were traced, and no attention keeps its scores,
    which grow with the square."""
    return all(
        fit.least_bytes is not None and fit.prediction.phases
        and "math" not in fit.prediction.attention
        for fit in fits
    )  # fmt: skip


def between(small: Fit, large: Fit, share: float) -> float | None:
    """Bytes that a sample needs at the least which lies this ``share`` of the way between two that
    were traced; None where nothing lies on a line."""
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


# ---- usual ----
# The usual sample at each place: the recipes that may be the fastest that fits, in the order of
# their speed. No torch.
#
# A recipe that is slower than one that fits is not traced. Nor is one on a card of another kind
# (of other kernels of attention) that the trace for a kind before says is far from being the
# answer: the two differ little, and what is told of a card is of its own trace.


HOSTED, GATHERED = "host_optimizer", "split_parameters"
USUAL = "samples of the usual size"
NEAR = 0.03
"""By what share of a need and of a step's seconds kinds of cards are allowed to differ before a
trace is made for the second, too; ``tests/bench/kinds_of_cards.py`` says how far they do."""

Known = Mapping[tuple[str, int, str], Prediction]
"""(model, number of GPUs, recipe) -> its trace for another kind of card."""


def usual_cells(places: Sequence[Scenario], ask: Ask) -> Cells:
    """Of each place and training one, in order, each with its place."""
    kinds: dict[str, list[Scenario]] = {}
    for place in places:
        kinds.setdefault(place.kind, []).append(place)
    known: Known = {}
    for some in sorted(kinds.values(), key=len, reverse=True):
        _fill([Search(place, known) for place in some], ask)
        known = dict(known) | {
            (place.model, place.asked.processes, fit.label): fit.prediction
            for place in some
            for fit in place.fits
            if fit.prediction.method == "trace"
        }
    return [(place, place.cell(training)) for place in places for training in TRAININGS]


def _fill(searches: Sequence[Search], ask: Ask) -> None:
    """Trace at each place the recipes that may be the fastest that fits."""
    while now := [(one, row) for one in searches for row in one.wanted()]:
        fits = ask([(one.place, row) for one, row in now], USUAL)
        for (one, row), fit in zip(now, fits, strict=True):
            one.take(row, fit)
    for one in searches:
        one.end()


class Search:
    """What is still to be traced at a place."""

    def __init__(self, place: Scenario, known: Known) -> None:
        self.place, gpu = place, place.asked.gpu
        self.left = list(place.asked.resolved)
        self.guessed: dict[str, Fit] = {}
        for row in self.left:
            other = known.get((place.model, place.asked.processes, str(row.recipe)))
            if other is not None and not verdict.lack_of(row, gpu):
                self.guessed[str(row.recipe)] = verdict.judge(row, other, gpu)

    def wanted(self) -> list[Resolved]:
        """The rows to trace now; none where the answers are known."""
        able = [fit.resolved for fit in self._fits if fit.fits and self._sure(fit)]
        self.left = [r for r in self.left if not any(_slower(r, one) for one in able)]
        # What a guess says does not fit is waited for by none.
        first = [r for r in self.left if (fit := self._guess(r)) is None or _turns(fit)]
        blind = [
            row for row in self.left
            if self._guess(row) is None and not any(_slower(row, other) for other in first)
        ]  # fmt: skip
        return blind or [fit.resolved for name in TRAININGS for fit in self._able_to_win(name)]

    def take(self, row: Resolved, fit: Fit) -> None:
        """``row`` was traced."""
        self.place.fits.append(fit)
        self.left.remove(row)
        self.guessed.pop(fit.label, None)

    def end(self) -> None:
        """Nothing is wanted any more: fits in the order of recipes."""
        order = [str(row.recipe) for row in self.place.asked.resolved]
        self.place.fits.sort(key=lambda fit: order.index(fit.label))

    def _guess(self, row: Resolved) -> Fit | None:
        return self.guessed.get(str(row.recipe))

    @property
    def _guesses(self) -> list[Fit]:
        return [*filter(None, map(self._guess, self.left))]

    @property
    def _fits(self) -> list[Fit]:
        return [*self.place.fits, *self._guesses]

    def _sure(self, fit: Fit) -> bool:
        """Whether a fit is traced, or so far from the card that its own trace would say the
        same."""
        return fit.label not in self.guessed or not _turns(fit)

    def _able_to_win(self, training: str) -> list[Fit]:
        """Guesses that may be the answer."""
        some = of_training(self._fits, training)
        best = verdict.fastest(some) or verdict.nearest(some)
        guesses = of_training(self._guesses, training)
        return [fit for fit in guesses if _turns(fit) or _as_good(fit, best)]


def _turns(fit: Fit) -> bool:
    """Whether an end of a need is so near the card that another kind's may be on its other side."""
    has = fit.gpu.memory_bytes
    ends = (fit.most_bytes, fit.need_bytes - fit.spread_bytes, fit.least_bytes)
    return any(abs(end - has) <= NEAR * has for end in ends)


def _as_good(fit: Fit, best: Fit) -> bool:
    """Whether it may be better than what looks best."""
    if not best.may_fit:
        return (1 - NEAR) * fit.shortage <= best.shortage
    speeds = fit.samples_per_second, best.samples_per_second
    return fit.verdict == best.verdict and speeds[0] >= (1 - NEAR) * speeds[1]


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


LARGER = "larger samples"
WHOLE = frozenset({"one_process", "replicas"})
"""Traits of a launch whose ranks hold all that is trained."""


def cells_at(places: Sequence[Scenario], ask: Ask, doublings: int) -> list[Cell]:
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


def _trace(place: Scenario, edge: Edge) -> Any:
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

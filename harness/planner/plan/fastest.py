"""Search for the fastest recipe of a lattice that fits: predict only those that may still win.

No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.planner import verdict
from harness.planner.export import trainers
from harness.planner.plan.bounds import Bounds, Known
from harness.planner.plan.lattice import Point, adapts
from harness.planner.verdict import Fit
from harness.resolve import Resolved
from harness.spec import Spec
from harness.system.cards import Card

NEAR = 0.01
"""Relative difference of two times below which another prediction is not worth its time."""
TIE = 0.03
"""Relative difference of two times up to which the recipe with fewer parts is the answer, if both
are sure to fit. Of others, fewer parts alone decide only up to ``NEAR``."""
EVEN = 0.1
"""Relative difference of two times up to which the recipe that people take first is the answer."""
HANDICAP = 1.4
"""Estimate of the factor by which an uncommon recipe must be faster to be the answer. It orders
predictions; ``within`` decides."""
UNTIMED = 6
"""Recipes without a prediction after which a search stops."""
SMALLEST = 3
"""Most recipes that are predicted to find the one that needs the least, if none fits."""


# ---- recipes that trainers take ----


def trained_by(row: Resolved) -> list[str]:
    """Return the trainers that know the model of ``row`` and have options for all of its parts."""
    return [name for name in _trainers(row) if not trainers.translated(name, row, "").unplanned]


def _trainers(row: Resolved) -> list[str]:
    """Return the trainers that train this model, all of its weights or an adapter."""
    model, kind = row.spec.model, "lora" if adapts(row) else "full"
    tables = {name: trainers.table(name)["models"].get(model, {}) for name in trainers.known()}
    return [name for name, words in tables.items() if {kind, "any"} & set(words)]


def common(row: Resolved) -> bool:
    """Return True if a trainer of the model has options for all parts of ``row``.

    If no trainer has the model, a recipe is common if it keeps trained weights and optimizer state
    unrounded.
    """
    if row.spec not in _COMMON:
        _COMMON[row.spec] = _common(row)
    return _COMMON[row.spec]


_COMMON: dict[Spec, bool] = {}


def _common(row: Resolved) -> bool:
    if _trainers(row):
        return bool(trained_by(row))
    pure = "pure_bf16" in row.launch.traits and not adapts(row)
    return not pure and "rounds_state" not in row.launch.traits


# ---- search ----


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Result of a search: its answer, and how many recipes were predicted of how many.

    ``failed``: recipes whose prediction failed. ``unable``: recipes that the card cannot run.
    ``nearest``: the predicted one with the smallest shortage, if none fits. ``adapters``: the
    lattice's recipes train adapters. ``sure``: the answer fits by the upper end of its range.
    ``quicker``: the fastest recipe of all, if it is uncommon and not the answer. ``even``: the
    fastest common recipe, if another that is up to ``EVEN`` slower is the answer (``best_of``).
    ``all_usual``: all recipes of the lattice are common.
    """

    best: Fit | None
    quicker: Fit | None
    even: Fit | None
    nearest: Fit | None
    predicted: int
    failed: int
    unable: int
    recipes: int
    adapters: bool
    sure: bool
    all_usual: bool

    @property
    def as_json(self) -> dict[str, Any]:
        """The search as plain data."""
        found = {"training": "adapters" if self.adapters else "all weights"}
        names = ("recipes", "predicted", "failed", "unable", "sure")
        found |= {name: getattr(self, name) for name in names}
        return found | {"answer": self.best.label if self.best else None}


class Search:
    """Search among ``rows`` that train the same weights: the fastest that fits ``gpu``.

    A ``common`` recipe is preferred if it is within the uncertainty of time of the fastest. If none
    is sure to fit, the search continues among those that may fit.
    """

    def __init__(
        self, rows: Sequence[Resolved], gpu: Card, common: Callable[[Resolved], bool] = common
    ) -> None:
        self.rows, self.gpu, self.common, self.sure = rows, gpu, common, True
        self.bounds, self.fits, self.small = Bounds(gpu=gpu), [], 0
        self.left = [Point(row) for row in rows if not verdict.lack_of(row, gpu)]
        self.unable = len(rows) - len(self.left)

    @property
    def proof(self) -> Proof:
        """The result, once nothing is wanted."""
        best, quick = best_of(self.fits, self.common), verdict.fastest(self.fits)
        usual = verdict.fastest([fit for fit in self.fits if self.common(fit.resolved)])
        ahead = (
            best
            and usual
            and usual.verdict == best.verdict
            and not _as_fast(best, usual.seconds.total)
        )
        known = [fit for fit in self.fits if fit.need_bytes is not None]
        return Proof(
            best=best,
            quicker=quick if quick not in (best, usual) else None,
            even=usual if ahead else None,
            nearest=None if best else verdict.nearest(known),
            predicted=len(known),
            failed=len(self.fits) - len(known),
            unable=self.unable,
            recipes=len(self.rows),
            adapters=Point(self.rows[0]).adapted,
            sure=self.sure,
            all_usual=all(map(self.common, reversed(self.rows))),
        )

    def wanted(self) -> list[Resolved]:
        """Return the rows to predict next; none if the answer is known."""
        if len(self.fits) >= UNTIMED and not self.bounds.known:
            return []
        found = self._next()
        if not found and self.sure and not self._able:
            self.sure = False
            found = self._next()
        return [one.row for one in found or self._smallest()]

    def take(self, fits: Sequence[Fit]) -> None:
        """Add predictions of wanted rows."""
        done = {fit.label for fit in fits}
        self.left = [one for one in self.left if one.label not in done]
        self.fits += fits
        timed = [fit for fit in fits if fit.seconds and fit.need_bytes is not None]
        self.bounds.known += map(Known, timed)

    @property
    def _able(self) -> list[Fit]:
        """Predictions that fit, or that may if none is sure to."""
        fits = [known.fit for known in self.bounds.known]
        return [fit for fit in fits if fit.fits or (fit.may_fit and not self.sure)]

    def _next(self) -> list[Point]:
        able = self._able
        some = [one for one in self.left if self._may_win(one, able)]
        if some and not self.bounds.known:
            return self._roots()
        return sorted(some, key=self._order)[:1]

    def _roots(self) -> list[Point]:
        """Return the first rows: of one column, with all activations kept and with few.

        It is the first in the lattice's order whose weights may fit, common ones before others; if
        none may, the smallest. A column whose rows failed comes after all others.
        """
        whole = [one for one in self.left
                 if not (one.quantized or one.swapped or one.moved)]  # fmt: skip
        some = [one for one in whole if one.state_bytes] or whole or self.left
        failed = {Point(fit.resolved).column for fit in self.fits}
        some = [one for one in some if one.column not in failed] or some
        small = [one for one in some if self.bounds.may_fit(one, sure=True)]
        small.sort(key=lambda one: not self.common(one.row))
        least = min(some, key=lambda one: one.state_bytes + one.gradient_bytes)
        first = small[0] if small else least
        alike = [one for one in some if one.column == first.column]
        ends = [pick(alike, key=lambda one: one.kept) for pick in (max, min)]
        return ends[: len(alike)]

    def _may_win(self, one: Point, able: Sequence[Fit]) -> bool:
        """Return True if the bounds leave open that ``one`` is the answer."""
        if not self.bounds.may_fit(one, sure=self.sure):
            return False
        if not able:
            return True
        floor = self.bounds.seconds(one)
        usual = [fit for fit in able if self.common(fit.resolved)]
        if self.common(one.row):
            near = all(within(floor, fit.seconds.total, fit) for fit in able)
            return near and self._first_or_faster(one, floor, usual)
        if any(within(fit.seconds.total, floor, fit) for fit in usual):
            return False
        return self._first_or_faster(one, floor, able)

    def _first_or_faster(self, one: Point, floor: float, some: Sequence[Fit]) -> bool:
        """Return True if ``one`` may be faster than ``some``, or even with them and taken first.

        Of those that are as fast, one with fewer parts is taken first.
        """
        if not any(_as_fast(fit, floor) for fit in some):
            return True
        first = _first_of(some)
        if one.rank != Point(first[0].resolved).rank:
            even = _even(floor, min(fit.seconds.total for fit in some))
            return even and one.rank < Point(first[0].resolved).rank
        near = _near_of(first)
        simple = _parts(one.row) < min(_parts(fit.resolved) for fit in near)
        return simple and (1 - tie_of(near)) * floor <= min(fit.seconds.total for fit in near)

    def _smallest(self) -> list[Point]:
        """Return the row estimated to need the least, if none fits and it is not predicted."""
        if self._able or not self.left or self.small == SMALLEST:
            return []
        one = min(self.left, key=self._need_order)
        known = [fit.shortage for fit in self.fits if fit.need_bytes is not None]
        if known and min(known) <= self.bounds.likely_shortage(one):
            return []
        self.small += 1
        return [one]

    def _need_order(self, one: Point) -> tuple[float, float, int]:
        """Sort key: the smallest by estimate, and of equal ones those that keep the least."""
        return (self.bounds.likely_shortage(one), one.kept, -one.swapped)

    def _order(self, one: Point) -> tuple[bool, float, float]:
        """Sort key: the fastest by estimate that fits by estimate, then the smallest."""
        need = self.bounds.likely_need(one)
        if self.bounds.likely_fits(one):
            handicap = 1.0 if self.common(one.row) else HANDICAP
            return (False, handicap * self.bounds.likely_seconds(one), need)
        return (True, need, 0.0)


class Lean(Search):
    """Search for any row that is sure to fit; those that need the least are predicted first."""

    def wanted(self) -> list[Resolved]:
        """Return the row to predict next; none if one fits or none can."""
        if self._able or (len(self.fits) >= UNTIMED and not self.bounds.known):
            return []
        some = [one for one in self.left if self.bounds.may_fit(one, sure=True)]
        return [min(some, key=self._need_order).row] if some else []


def _as_fast(fit: Fit, floor: float) -> bool:
    return (1 - NEAR) * fit.seconds.total <= floor


def within(slow: float, fast: float, fit: Fit) -> bool:
    """Return True if ``slow`` seconds may be as few as ``fast``, with half of the uncertainty of
    ``fit`` in favour of each."""
    share = fit.seconds.spread / fit.seconds.total / 2
    return slow * (1 - share) <= fast * (1 + share)


def best_of(fits: Sequence[Fit], common: Callable[[Resolved], bool]) -> Fit | None:
    """Return the answer of ``fits``.

    The fastest common one is taken if it may be as fast as the fastest of all. Of those that take
    up to ``EVEN`` longer, those count that are first by ``Point.rank``. Of these, up to ``TIE``
    slower than the fastest, the answer has the fewest parts; if it only may fit, up to ``NEAR``.
    """
    best = verdict.fastest(fits)
    if best is None:
        return None
    some = [fit for fit in fits if fit.verdict == best.verdict and fit.seconds]
    usual = _usual_of(some, best, common)
    if usual:
        best, some = usual, [fit for fit in some if common(fit.resolved)]
    near = _near_of(_first_of(some))
    return min(near, key=lambda fit: (_parts(fit.resolved), fit.seconds.total))


def _first_of(some: Sequence[Fit]) -> list[Fit]:
    """Return the first by ``Point.rank`` of those up to ``EVEN`` slower than the fastest."""
    least = min(fit.seconds.total for fit in some)
    even = [fit for fit in some if _even(fit.seconds.total, least)]
    first = min(Point(fit.resolved).rank for fit in even)
    return [fit for fit in even if Point(fit.resolved).rank == first]


def _near_of(some: Sequence[Fit]) -> list[Fit]:
    """Return those that are tied with the fastest of them."""
    least, tie = min(fit.seconds.total for fit in some), tie_of(some)
    return [fit for fit in some if (1 - tie) * fit.seconds.total <= least]


def tie_of(some: Sequence[Fit]) -> float:
    """Return the relative difference of times up to which fewer parts decide among ``some``."""
    return TIE if all(fit.fits for fit in some) else NEAR


def _parts(row: Resolved) -> int:
    return len(row.recipe.strategies)


def _usual_of(some: Sequence[Fit], best: Fit, common: Callable[[Resolved], bool]) -> Fit | None:
    """Return the fastest common fit if it may be as fast as ``best``."""
    usual = verdict.fastest([fit for fit in some if common(fit.resolved)])
    near = usual and within(usual.seconds.total, best.seconds.total, best)
    return usual if near else None


def _even(slow: float, fast: float) -> bool:
    return slow <= (1 + EVEN) * fast


def searches_of(rows: Sequence[Resolved], gpu: Card) -> list[Search]:
    """Return a search for adapters and one for all weights, if ``rows`` have both."""
    kinds = [[row for row in rows if adapts(row) is frozen] for frozen in (True, False)]
    return [Search(rows=some, gpu=gpu) for some in kinds if some]


def run(
    searches: Sequence[Search], ask: Callable[[list[tuple[Search, Resolved]]], list[Fit]]
) -> None:
    """Run searches side by side to their ends. ``ask`` predicts rows of each."""
    while asked := [(one, row) for one in searches for row in one.wanted()]:
        found: dict[int, list[Fit]] = {}
        for (one, _), fit in zip(asked, ask(asked), strict=True):
            found.setdefault(id(one), []).append(fit)
        for one in searches:
            one.take(found.get(id(one), ()))


def search(
    rows: Sequence[Resolved], gpu: Card, ask: Callable[[list[Resolved]], list[Fit]]
) -> tuple[list[Fit], list[Proof]]:
    """Search for the fastest adapter and the fastest training of all weights, side by side.

    Return all predictions, and a proof for each of the two that the lattice has. ``ask`` predicts
    rows.
    """
    searches = searches_of(rows, gpu)
    run(searches, lambda pairs: ask([row for _, row in pairs]))
    return [fit for one in searches for fit in one.fits], [one.proof for one in searches]

"""The usual sample at each place: the recipes that may be the fastest that fits, in the order of
their speed. No torch.

A recipe that is slower than one that fits is not traced. Nor is one on a card of another kind (of
other kernels of attention) that the trace for a kind before says is far from being the answer: the
two differ little, and what is told of a card is of its own trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.commands.atlas.cells import TRAININGS, of_training
from harness.commands.atlas.places import Ask, Cells, Place
from harness.commands.planning.plan.answer import ADAPTED
from harness.predict import verdict
from harness.predict.prediction import Prediction
from harness.predict.verdict import Fit
from harness.resolve import Resolved

__all__ = ["NEAR", "usual_cells"]

HOSTED, GATHERED = "host_optimizer", "split_parameters"
USUAL = "samples of the usual size"
NEAR = 0.03
"""By what share of a need and of a step's seconds kinds of cards are allowed to differ before a
trace is made for the second, too; ``tests/bench/kinds_of_cards.py`` says how far they do."""

Known = Mapping[tuple[str, int, str], Prediction]
"""(model, number of GPUs, recipe) -> its trace for another kind of card."""


def usual_cells(places: Sequence[Place], ask: Ask) -> Cells:
    """Of each place and training one, in order, each with its place."""
    kinds: dict[str, list[Place]] = {}
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

    def __init__(self, place: Place, known: Known) -> None:
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

"""Cells of the atlas: model, training, card and number of GPUs; and the predictions that fill
them.

No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.text import Text

from harness import RUN
from harness.commands.progress import Predictions, counted
from harness.planner import verdict
from harness.planner.advice import sample_name
from harness.planner.explore import Search, run, searches_of
from harness.planner.plan.answer import gib, rate_in_words
from harness.planner.plan.candidates import Asked
from harness.planner.plan.lattice import adapts
from harness.planner.plan.request import export_command
from harness.planner.plan.table import SHOWN, by_category, order
from harness.planner.plan.tracing import judged, recorded
from harness.planner.speed.roofline import Seconds
from harness.planner.verdict import Fit, judge
from harness.planner.worker import none
from harness.prediction import Prediction
from harness.report.figures.units import GIB
from harness.resolve import Resolved
from harness.system.cards import Card

if TYPE_CHECKING:
    from rich.console import Console


USUAL = "samples of the usual size"
TRAININGS = {"LoRA": True, "all weights": False}
"""Kind of training -> True if it freezes some of the model's weights."""
HEADS = ("Model", "Training", "GPUs", "Card", "Has GiB", "Sample", "Fits", "Recipe", "Needs GiB",
         "Needs +-", *SHOWN, "Host GiB", "Host has", "Step s", "From s", "To s", "Speed",
         "Command", "Export", "Recipes")  # fmt: skip
"""Columns of the page; those of ``SHOWN`` are GiB by category at the peak.

``Recipes``: all predicted recipes of the cell that are shown, as ``recipe_words``.
"""
WORD = {"fits": "yes", "tight": "tight", "host": "host", "no": "no"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The fastest recipe predicted to fit, or else the one with the smallest need.

    ``fit`` is None if no recipe could be predicted, for ``reason``. ``rivals``: fits of other
    recipes. ``complete``: a prediction was kept for each recipe that was asked for.
    """

    model: str
    training: str
    gpus: int
    card: str
    card_bytes: int
    fit: Fit | None
    reason: str
    command: str
    rivals: Sequence[Fit] = ()
    complete: bool = True

    @property
    def texts(self) -> list[str]:
        """The cell's text for each of ``HEADS``."""
        first = [self.model, self.training, str(self.gpus), self.card, gib(self.card_bytes)]
        if self.fit is None:
            blank = [""] * (len(HEADS) - 11)
            return [*first, "", "not predicted", self.reason, *blank, self.command, "", ""]
        fit, kinds = self.fit, category_words(self.fit)
        seconds = fit.seconds
        times = second_words(seconds) if seconds else ["", "", ""]
        speed = rate_in_words(fit) if seconds else ""
        need = [sample_name(fit.resolved), WORD[fit.verdict], fit.label]
        need += [gib(fit.need_bytes), gib(fit.spread_bytes)]
        host = [gib(fit.host_bytes), gib(fit.host_memory)]
        shown = sorted((one for one in self.rivals if one is not fit), key=order)[: MOST - 1]
        recipes = "; ".join(map(recipe_words, (fit, *shown)))
        commands = [self.command, export_command(fit), recipes]
        return [*first, *need, *kinds, *host, *times, speed, *commands]


MOST = 10
"""Recipes that the page shows of a cell."""


def category_words(fit: Fit) -> list[str]:
    """Return the GiB of each category of ``SHOWN`` at the peak; ``-`` if it is unknown."""
    return [gib(by_category(fit).get(head)) for head in SHOWN]


def second_words(found: Seconds) -> list[str]:
    """Return the seconds of a step and the two ends of their range."""
    return [f"{one:.2f}" for one in (found.total, found.low, found.high)]


def recipe_words(fit: Fit) -> str:
    """Return a recipe's figures as words.

    First its name and the verdict by the GPU's memory alone. Then GiB of a GPU and their range, GiB
    of the host and their upper end, and seconds of a step and their range. Last GiB by category.
    """
    low = min(fit.need_bytes - fit.spread_bytes, fit.least_bytes)
    on_gpu = verdict.decide(low, fit.most_bytes, fit.gpu.memory_bytes)
    most = math.ceil(10 * (fit.host_most or 0) / GIB) / 10  # never told lower than it is
    times = second_words(fit.seconds) if fit.seconds else ["-", "-", "-"]
    host = ["-", "-"] if fit.host_bytes is None else [gib(fit.host_bytes), f"{most:.1f}"]
    found = [fit.label, WORD[on_gpu], gib(fit.need_bytes), gib(fit.spread_bytes), *host, *times]
    return " ".join([*found, *category_words(fit)])


# ---- progress ----


class AtlasProgress(Predictions):
    """Progress over ``models`` models. A log has a line for each new prediction."""

    def __init__(self, console: Console, models: int) -> None:
        super().__init__(console)
        self.models, self.at, self.before, self.told = models, 0, 0, ""
        self.first = self.since = self.now()
        self.made_of_models = 0

    def begin_models(self, names: Sequence[str]) -> None:
        """Start the cells of some models."""
        self.before, self.at = self.at, self.at + len(names)
        self.since, self.made_of_models, self.told = self.now(), 0, ""
        which = f"model {self.at}" if len(names) == 1 else f"models {self.before + 1} to {self.at}"
        line = Text.assemble((", ".join(names), "bold"), f"  {which} of {self.models}")
        self.console.print(line, soft_wrap=True)

    def announce(self, text: str) -> None:
        """Print nothing: the lines of new predictions name their purpose."""

    def done(self, index: int, prediction: Prediction) -> None:
        """Count a prediction, and those that an earlier call did not make."""
        self.made_of_models += index not in self.kept
        super().done(index, prediction)

    def print_done(self, prediction: Prediction) -> None:
        """Print a new prediction in a log, below its purpose."""
        if self.told != self.why:
            self.told = self.why
            self.say(Text(f"  {self.why}"))
        why = "" if prediction.method == "trace" else f": {prediction.reason}"
        self.say(Text(f"    {self.last}{why}  {self.seconds:.0f} s"))

    def rest_seconds(self) -> float | None:
        """Estimate the seconds left of all models from those that have ended."""
        if not self.before:
            return None
        each = (self.since - self.first) / self.before
        spent = self.now() - self.since
        return max(0.0, each * (self.models - self.before) - spent)

    def end_models(self, cells: int) -> None:
        """Print the totals of these models."""
        left, seconds = self.models - self.at, self.now() - self.since
        after = f"{counted(left, 'model')} left" if left else "the last model"
        made = f"{self.made_of_models} predictions made"
        self.say(Text(f"  {cells} cells, {made}, {seconds:.0f} s; {after}"))


# ---- scenarios ----
# All scenarios are predicted in one call, so that every core has work.


@dataclass(kw_only=True, eq=False)
class Scenario:
    """A model on a number of one card: the request, fits of listed rows, and searches."""

    model: str
    card: str
    asked: Asked
    fits: list[Fit] = field(default_factory=list)
    searches: list[Search] = field(init=False)

    def __post_init__(self) -> None:
        asked = self.asked
        self.searches = searches_of(asked.resolved, asked.gpu) if asked.searched else []

    def cell(self, training: str) -> Cell:
        """Return the cell of one training: the answer of its search, or the best of its rows."""
        frozen, gpu = TRAININGS[training], self.asked.gpu
        every = self.fits + [fit for one in self.searches for fit in one.fits]
        fits = [fit for fit in every if adapts(fit.resolved) == frozen]
        proofs = [one.proof for one in self.searches]
        answer = next((one.best for one in proofs if one.adapters == frozen), None)
        best = answer or verdict.fastest(fits) or verdict.nearest(fits)
        reason = next((fit.lack or fit.prediction.reason for fit in fits), "no recipe")
        option = "--gpu-memory" if self.card[0].isdigit() else "--gpu"
        command = f"{RUN} plan --model {self.model} --gpus {self.asked.processes}"
        command += f" {option} {self.card}" + (f" --recipes {best.label}" if best else "")
        return Cell(
            model=self.model,
            training=training,
            gpus=self.asked.processes,
            card=self.card,
            card_bytes=gpu.memory_bytes,
            fit=best,
            reason="" if best else reason,
            command=command,
            rivals=[fit for fit in fits if fit.need_bytes is not None],
            complete=all(fit.prediction.reason != NOT_KEPT for fit in fits),
        )


Pairs = Sequence[tuple[Scenario, Resolved]]
Ask = Callable[[Pairs, str], list[Fit]]
"""Return a fit for each row in its scenario, in order; the text is the purpose of the request."""


def predicted(pairs: Pairs, why: str, *, jobs: int, progress: AtlasProgress) -> list[Fit]:
    """Judge all rows in one call. This is an ``Ask``."""
    asked = [(row, place.asked.gpu) for place, row in pairs]
    return judged(asked, _name, why, jobs=jobs, told=progress)


NOT_KEPT = "no prediction of it is kept"


def shipped(pairs: Pairs, _why: str) -> list[Fit]:
    """Judge rows by recorded predictions alone, alike on each machine. This is an ``Ask``."""
    return [recorded(row, place.asked.gpu) or _lost(row, place) for place, row in pairs]


def _lost(row: Resolved, place: Scenario) -> Fit:
    return judge(row, none(row, NOT_KEPT), place.asked.gpu)


def _name(row: Resolved, gpu: Card) -> str:
    gpus = f" x {row.spec.processes}" if row.spec.processes > 1 else ""
    return f"{row.spec.model} {row.recipe}{gpus}"


def cells_at(places: Sequence[Scenario], ask: Ask) -> list[Cell]:
    """Return a cell for each scenario and training, in order.

    The searches are those of plans and ask for the same rows in the same order, so a cell has the
    answer of its plan.
    """
    listed = [(place, row) for place in places if not place.asked.searched
              for row in place.asked.resolved]  # fmt: skip
    for (place, _), fit in zip(listed, ask(listed, USUAL) if listed else (), strict=True):
        place.fits.append(fit)
    placed = {one: place for place in places for one in place.searches}
    run(list(placed), lambda pairs: ask([(placed[one], row) for one, row in pairs], USUAL))
    return [place.cell(training) for place in places for training in TRAININGS]

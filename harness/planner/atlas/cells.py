"""Cells of the atlas: for a model, training, card and number of GPUs, the answer of a plan.
No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness import RUN
from harness.planner import verdict
from harness.planner.plan.answer import gib, rate_in_words
from harness.planner.plan.lattice import adapts
from harness.planner.plan.request import export_command
from harness.planner.plan.table import SHOWN, by_category, order
from harness.planner.plan.tracing import Asking
from harness.planner.search import sample_name
from harness.planner.speed.roofline import Seconds
from harness.planner.verdict import Fit
from harness.report.figures.units import GIB

TRAININGS = {True: "LoRA", False: "all weights"}
"""Whether some of the model's weights are frozen -> kind of training."""
HEADS = ("Model", "Training", "GPUs", "Card", "Has GiB", "Sample", "Fits", "Recipe", "Needs GiB",
         "Needs +-", *SHOWN, "Host GiB", "Host has", "Step s", "From s", "To s", "Speed",
         "Command", "Export", "Recipes")  # fmt: skip
"""Fields of a cell; those of ``SHOWN`` are GiB by category at the peak.
``Recipes``: the predicted recipes that are shown, as ``recipe_words``, the answer first."""
WORD = {"fits": "yes", "tight": "tight", "host": "host", "no": "no"}
MOST = 10
"""Recipes that the page shows of a cell."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The answer of a plan for one training, or what needs the least; ``rivals``: other fits.
    ``fit`` is None if no recipe could be predicted, for ``reason``."""

    model: str
    training: str
    gpus: int
    card: str
    card_bytes: int
    fit: Fit | None
    reason: str
    rivals: Sequence[Fit]

    @property
    def command(self) -> str:
        """The command that plans the cell's recipe."""
        option = "--gpu-memory" if self.card[0].isdigit() else "--gpu"
        text = f"{RUN} plan --model {self.model} --gpus {self.gpus} {option} {self.card}"
        return text + (f" --recipes {self.fit.label}" if self.fit else "")

    @property
    def texts(self) -> list[str]:
        """The cell's text for each of ``HEADS``."""
        first = [self.model, self.training, str(self.gpus), self.card, gib(self.card_bytes)]
        if self.fit is None:
            blank = [""] * (len(HEADS) - 11)
            return [*first, "", "not predicted", self.reason, *blank, self.command, "", ""]
        fit, kinds = self.fit, category_words(self.fit)
        times = second_words(fit.seconds) if fit.seconds else ["", "", ""]
        speed = rate_in_words(fit) if fit.seconds else ""
        need = [sample_name(fit.resolved), WORD[fit.verdict], fit.label]
        need += [gib(fit.need_bytes), gib(fit.spread_bytes)]
        host = [gib(fit.host_bytes), gib(fit.host_memory)]
        shown = sorted((one for one in self.rivals if one is not fit), key=order)[: MOST - 1]
        recipes = "; ".join(map(recipe_words, (fit, *shown)))
        commands = [self.command, export_command(fit), recipes]
        return [*first, *need, *kinds, *host, *times, speed, *commands]


def category_words(fit: Fit) -> list[str]:
    """Return the GiB of each category of ``SHOWN`` at the peak; ``-`` if it is unknown."""
    return [gib(by_category(fit).get(head)) for head in SHOWN]


def second_words(found: Seconds) -> list[str]:
    """Return the seconds of a step and the two ends of their range."""
    return [f"{one:.2f}" for one in (found.total, found.low, found.high)]


def recipe_words(fit: Fit) -> str:
    """Return a recipe's figures as words.
    First its name and the verdict by the GPU's memory alone. Then GiB of a GPU and their range, GiB
    of the host and their upper end, and seconds of a step and their range. Last GiB by category."""
    low = min(fit.need_bytes - fit.spread_bytes, fit.least_bytes)
    on_gpu = verdict.decide(low, fit.most_bytes, fit.gpu.memory_bytes)
    most = math.ceil(10 * (fit.host_most or 0) / GIB) / 10  # never told lower than it is
    times = second_words(fit.seconds) if fit.seconds else ["-", "-", "-"]
    host = ["-", "-"] if fit.host_bytes is None else [gib(fit.host_bytes), f"{most:.1f}"]
    found = [fit.label, WORD[on_gpu], gib(fit.need_bytes), gib(fit.spread_bytes), *host, *times]
    return " ".join([*found, *category_words(fit)])


def cells_of(model: str, card: str, asking: Asking) -> list[Cell]:
    """Return the cell of each training that the plan of ``asking`` answers."""
    every, proofs, _ = asking.answer(ways=False)
    answers = {one.adapters: one.best for one in proofs}
    cells = []
    for frozen, training in TRAININGS.items():
        fits = [fit for fit in every if adapts(fit.resolved) == frozen]
        best = answers.get(frozen) or verdict.fastest(fits) or verdict.nearest(fits)
        reason = next((fit.lack or fit.prediction.reason for fit in fits), "no recipe")
        cells.append(Cell(
            model=model,
            training=training,
            gpus=asking.asked.processes,
            card=card,
            card_bytes=asking.asked.gpu.memory_bytes,
            fit=best,
            reason="" if best else reason,
            rivals=[fit for fit in fits if fit.need_bytes is not None],
        ))  # fmt: skip
    return cells

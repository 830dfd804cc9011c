"""Where an atlas asks: one model on so many of one card; and how, all places at once, so that every
core has work. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from harness.commands.atlas.cells import Cell, cell_of
from harness.commands.atlas.progress import AtlasProgress
from harness.commands.planning.plan.asked import Asked
from harness.commands.planning.plan.asking import judged
from harness.predict import attention
from harness.predict.speed.cards import Card
from harness.predict.verdict import Fit, judge
from harness.resolve import Resolved

__all__ = ["Ask", "Cells", "Pairs", "Place", "Replicas", "predicted"]


@dataclass(kw_only=True, eq=False)
class Place:
    """A model on so many of one card: what is asked there, and each fit that is known."""

    model: str
    card: str
    asked: Asked
    fits: list[Fit] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """Of the card, by its kernels of attention: cards of a kind share their traces."""
        return attention.preferred(self.asked.gpu.capability)

    def cell(self, training: str) -> Cell:
        """The answer of one training."""
        named = {"model": self.model, "gpus": self.asked.processes, "card": self.card}
        memory = self.asked.gpu.memory_bytes
        return cell_of(self.fits, training, named | {"card_bytes": memory})


Pairs = Sequence[tuple[Place, Resolved]]
Cells = Sequence[tuple[Place, Cell]]
Ask = Callable[[Pairs, str], list[Fit]]
"""A fit of each row at its place, in order; with what they are asked for."""


def predicted(pairs: Pairs, why: str, *, jobs: int, progress: AtlasProgress) -> list[Fit]:
    """An ``Ask``: all by one call."""
    asked = [(row, place.asked.gpu) for place, row in pairs]
    return judged(asked, _name, why, jobs=jobs, told=progress)


def _name(row: Resolved, gpu: Card) -> str:
    gpus = f" x {row.spec.processes}" if row.spec.processes > 1 else ""
    return f"{row.spec.model} {row.recipe}{gpus}"


class Replicas:
    """An ``Ask`` for which DDP's rows of a library's models are traced on one number of GPUs, the
    first that is asked for: a rank holds and does the same however many there are, and
    ``tests/predict/test_replicas.py`` holds that. Of the own DiT each draws the noise of all.
    """

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.traced: dict[str, Resolved] = {}

    def __call__(self, pairs: Pairs, why: str) -> list[Fit]:
        rows = [self._traced(row) for _, row in pairs]
        asked = [(place, row) for (place, _), row in zip(pairs, rows, strict=True)]
        return [
            fit if fit.lack or fit.resolved is row else judge(row, fit.prediction, fit.gpu)
            for fit, (_, row) in zip(self.ask(asked, why), pairs, strict=True)
        ]

    def _traced(self, row: Resolved) -> Resolved:
        """The row whose trace is this one's."""
        processes = row.spec.processes
        alone = "replicas" in row.launch.traits and row.launch.layout.alike == processes
        if not alone or not row.subject.of_library:
            return row
        each = {"processes": 2, "global_batch": 2 * row.spec.global_batch // processes}
        return self.traced.setdefault(dataclasses.replace(row.spec, **each).key, row)

"""One cell of the atlas: a model, what is trained of it, a card, how many of them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.commands.atlas.sizes import name_of
from harness.commands.planning.plan.answer import ADAPTED, gib, rate_in_words
from harness.commands.planning.plan.table import SHOWN
from harness.predict import verdict
from harness.predict.verdict import Fit

__all__ = ["HEADS", "TRAININGS", "Cell", "cell_of", "of_training"]

TRAININGS = {"LoRA": True, "all weights": False}
"""What is trained -> whether some of the model's weights are frozen for it."""
HEADS = ("Model", "Training", "GPUs", "Card", "Has GiB", "Sample", "Fits", "Recipe", "Needs GiB",
         "Needs +-", *SHOWN, "Host GiB", "Host has", "Step s", "+-", "Speed", "Too large",
         "Command")  # fmt: skip
"""Of the page's columns; those of ``SHOWN`` are GiB by category at the peak instant."""
WORD = {"fits": "yes", "tight": "tight", "host": "host", "no": "no"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The fastest recipe predicted to fit, or, where none does, the one that needs least; None
    where nothing could be predicted, for ``reason``. ``beyond``: where it fits, the smallest sample
    that does not, as far as one was sought."""

    model: str
    training: str
    gpus: int
    card: str
    card_bytes: int
    fit: Fit | None
    reason: str
    command: str
    beyond: str = ""

    @property
    def texts(self) -> list[str]:
        """A text for each of ``HEADS``."""
        first = [self.model, self.training, str(self.gpus), self.card, gib(self.card_bytes)]
        if self.fit is None:
            blank = [""] * (len(HEADS) - 9)
            return [*first, "", "not predicted", self.reason, *blank, self.command]
        fit, instant = self.fit, self.fit.prediction.peak
        kinds = [
            gib(sum(instant.categories.get(n, 0) for n in names)) if instant else ""
            for names in SHOWN.values()
        ]
        seconds = fit.seconds
        times = [f"{seconds.total:.2f}", f"{seconds.spread:.2f}"] if seconds else ["", ""]
        speed = rate_in_words(fit) if seconds else ""
        need = [name_of(fit.resolved), WORD[fit.verdict], fit.label]
        need += [gib(fit.need_bytes), gib(fit.spread_bytes)]
        host = [gib(fit.host_bytes), gib(fit.host_memory)]
        return [*first, *need, *kinds, *host, *times, speed, self.too_large, self.command]

    @property
    def too_large(self) -> str:
        """The smallest sample that does not fit, as far as it is known."""
        short = self.fit is not None and not self.fit.fits
        return name_of(self.fit.resolved) if short else self.beyond


def of_training(fits: Sequence[Fit], training: str) -> list[Fit]:
    """Those that train what is meant."""
    frozen = TRAININGS[training]
    return [fit for fit in fits if (ADAPTED in fit.resolved.launch.traits) == frozen]


def cell_of(fits: Sequence[Fit], training: str, named: dict[str, object]) -> Cell:
    """The cell of one training; ``named`` are its model, GPUs and card."""
    some = of_training(fits, training)
    best = verdict.fastest(some) or verdict.nearest(some)
    reason = next((fit.lack or fit.prediction.reason for fit in some), "no recipe")
    command = f"./run.sh plan --model {named['model']} --gpus {named['gpus']}"
    card = str(named["card"])
    command += f" --gpu-memory {card}" if card[0].isdigit() else f" --gpu {card}"
    command += f" --recipes {best.label}" if best else ""
    return Cell(
        training=training,
        fit=best,
        reason="" if best else reason,
        command=command,
        **named,
    )

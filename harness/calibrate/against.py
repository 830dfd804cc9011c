"""Times of a plan held to results that were measured: by typical figures, and calibrated."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.calibrate.table import Table
from harness.predict.prediction import Prediction
from harness.predict.speed.cards import Card
from harness.predict.speed.roofline import Seconds, Work, seconds
from harness.report.figures import derive
from harness.result import Result

__all__ = ["Held", "as_json", "from_json", "held", "table"]


@dataclass(frozen=True, kw_only=True)
class Held:
    """A measured step, and what it was predicted to take. Seconds."""

    recipe: str
    processes: int
    work: tuple[Work, ...]
    measured: float

    def predicted(self, card: Card) -> Seconds:
        """By the rates of ``card``."""
        return seconds(self.work, card, self.processes, "tf32" in self.recipe.split("+"))

    def error(self, card: Card) -> float:
        """(predicted - measured) / measured."""
        return self.predicted(card).total / self.measured - 1


def held(results: Sequence[Result], predictions: Mapping[str, Prediction]) -> list[Held]:
    """The rows that ended well and have a prediction with work; a repeated row by its first run."""
    rows = []
    for result in results:
        found = predictions.get(result.spec.key)
        good = derive.effective_status(result)[0].value == "ok" and not result.spec.repeat
        if good and found and found.work and not result.spec.world:
            rows.append(
                Held(
                    recipe=result.spec.recipe,
                    processes=result.spec.processes,
                    work=tuple(found.work),
                    measured=derive.quantile(derive.step_seconds(result), 0.5),
                )
            )
    return sorted(rows, key=lambda row: row.measured)


def table(rows: Sequence[Held], card: Card) -> Table:
    """Each row by typical figures and by ``card``'s calibration, and the errors in sum."""
    ways = {"typical": dataclasses.replace(card, calibrated=None)}
    ways |= {"calibrated": card} if card.calibrated else {}
    heads = ["Row", "Processes", "Measured ms"]
    for name in ways:
        heads += [f"{name.capitalize()} ms", "Error %"]
    lines = [[*_measured(row), *(c for one in ways.values() for c in _cells(row, one))]
             for row in rows]  # fmt: skip
    note = " ".join(_summary(name, rows, one) for name, one in ways.items())
    return Table(f"Steps of {card.name}, planned and measured", heads, lines, note)


def _measured(row: Held) -> list[str]:
    return [row.recipe, str(row.processes), f"{1e3 * row.measured:.0f}"]


def _cells(row: Held, card: Card) -> list[str]:
    found = row.predicted(card)
    error = f"{100 * row.error(card):+.0f}"
    return [f"{1e3 * found.total:.0f} +-{1e3 * found.spread:.0f}", error]


def _summary(name: str, rows: Sequence[Held], card: Card) -> str:
    if not rows:
        return ""
    errors = [abs(row.error(card)) for row in rows]
    within = sum(
        abs(found.total - row.measured) <= found.spread
        for row in rows
        for found in [row.predicted(card)]
    )
    middle, worst = 100 * statistics.median(errors), 100 * max(errors)
    said = f"{name.capitalize()}: median error {middle:.0f} %, largest {worst:.0f} %"
    return f"{said}, {within} of {len(rows)} within the uncertainty."


def as_json(rows: Sequence[Held]) -> list[dict[str, Any]]:
    """Plain data, for a file."""
    return [dataclasses.asdict(row) for row in rows]


def from_json(data: Sequence[Mapping[str, Any]]) -> list[Held]:
    """What ``as_json`` made."""
    return [Held(**{**row, "work": tuple(Work(**w) for w in row["work"])}) for row in data]

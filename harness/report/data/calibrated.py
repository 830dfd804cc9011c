"""A row's time beside the one that the calibration of its device predicts, and its share of the
matrix products that were measured there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.calibration.record import Calibration, load
from harness.predict.prediction import Prediction
from harness.predict.speed import calibrated
from harness.predict.speed.cards import Card
from harness.predict.speed.roofline import Seconds, seconds
from harness.report.figures import derive
from harness.result import Result

__all__ = ["Calibrated", "calibrated_row", "read_calibration"]


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Seconds of a step: predicted by this device's calibration, plus or minus, and measured.
    ``typical``: predicted by typical figures, for comparison. ``peak_fraction``: the model's FLOPs
    a second over the matrix products measured on the device, in the type that the row computes in.
    ``words``: of what and when the calibration is."""

    predicted: Seconds | None
    typical: Seconds | None
    measured_seconds: float
    peak_fraction: float | None
    words: str

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        return self._error(self.predicted)

    @property
    def typical_error(self) -> float | None:
        """The same by typical figures."""
        return self._error(self.typical)

    def _error(self, found: Seconds | None) -> float | None:
        return found.total / self.measured_seconds - 1 if found else None


def read_calibration(folder: Path) -> Calibration | None:
    """Return the calibration beside the results in ``folder``, or None if there is none.

    Raises:
        BadInput: the file is no calibration.
    """
    path = Path(folder) / calibrated.FILE
    return load(path) if path.exists() else None


def calibrated_row(
    results: Sequence[Result], prediction: Prediction | None, found: Calibration | None
) -> Calibrated | None:
    """A row beside its device's calibration; None without one, for a simulated world,
    and on several machines, whose network no calibration has measured."""
    first = results[0]
    card = calibrated.of_environment(first.environment, found)
    if card is None or card.calibrated is None or first.spec.world:
        return None
    if first.spec.nodes > 1:
        return None
    plain = dataclasses.replace(card, calibrated=None)
    return Calibrated(
        predicted=_seconds(first, prediction, card),
        typical=_seconds(first, prediction, plain),
        measured_seconds=derive.quantile([s for r in results for s in derive.step_seconds(r)], 0.5),
        peak_fraction=_peak_fraction(results, card),
        words=card.calibrated.words,
    )


def _seconds(first: Result, prediction: Prediction | None, card: Card) -> Seconds | None:
    if prediction is None or not prediction.work:
        return None
    tf32 = "tf32" in first.spec.recipe.split("+")
    return seconds(prediction.work, card, first.spec.processes, tf32)


def _peak_fraction(results: Sequence[Result], card: Card) -> float | None:
    """Of a CPU's peak all processes together, of a GPU's each."""
    first = results[0]
    kind = derive.precision(first.evidence)
    measured = card.calibrated.calibration.ceilings.products.get(kind or "")
    median = derive.quantile([s for r in results for s in derive.step_seconds(r)], 0.5)
    flops = derive.flops_per_second(first.flops_per_step, median)
    if not measured or not flops:
        return None
    return flops / measured / (1 if card.shared else len(first.ranks))

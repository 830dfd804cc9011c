"""Predicted beside measured: what was predicted for a row, what was measured, and the errors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.calibration.record import Calibration
from harness.json_files import BadFile
from harness.memory.record import as_measured
from harness.predict import workspace
from harness.predict.prediction import Prediction, load
from harness.predict.speed import calibrated
from harness.predict.speed.roofline import Sent, sent
from harness.report.figures import categories, derive
from harness.report.figures.categories import CATEGORIES
from harness.result import Categories, Result

__all__ = [
    "FILE",
    "PredictedAndMeasured",
    "PredictedCategory",
    "predicted_and_measured",
    "predicted_categories",
    "read_predictions",
]

FILE = "prediction.json"
"""Beside a run's result."""
LEAST_SHARE = 0.05
"""Of the traced peak: a category with less is not compared."""
LEAST_HOSTED = 2**20
"""Bytes of host memory from which on its prediction is judged."""


@dataclass(frozen=True, kw_only=True)
class PredictedCategory:
    """A category at the peak of a step, in bytes; its error is a plain fraction, infinite where
    the run had nothing of the category."""

    name: str
    predicted: int
    measured: int

    @property
    def title(self) -> str:
        """The category as a sentence names it."""
        return categories.in_sentence(self.name)

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else math.inf


@dataclass(frozen=True, kw_only=True)
class PredictedAndMeasured:
    """One row's prediction beside its measurement. Bytes; errors as plain fractions.

    ``step_*``: live tensors on the device at the peak of one later step, against the run's own
    trace of one (the rank that the prediction stands for), and by category in ``categories``.
    ``hosted_*``: the same of what is kept in host memory. ``run_*``: of the whole run, set-up
    included, against the meter's highest: on a GPU the caching allocator's, which holds the
    workspaces of libraries too, without one tensors of both places against the resident mark.
    ``reserved_*``: what a GPU's allocator reserved, in the mode in which it ran. ``sent``: what a
    rank was predicted to send in a step; None where nothing was traced.
    """

    method: str
    reason: str | None
    step_predicted: int | None
    step_measured: int | None
    categories: tuple[PredictedCategory, ...]
    hosted_predicted: int | None
    hosted_measured: int | None
    run_predicted: int | None
    run_measured: int | None
    reserved_predicted: int | None
    reserved_measured: int | None
    sent: Sent | None = None

    @property
    def step_error(self) -> float | None:
        return relative_error(self.step_predicted, self.step_measured)

    @property
    def hosted_error(self) -> float | None:
        """None below ``LEAST_HOSTED``, where a few pinned samples are all that there is."""
        if max(self.hosted_predicted or 0, self.hosted_measured or 0) < LEAST_HOSTED:
            return None
        return relative_error(self.hosted_predicted, self.hosted_measured)

    @property
    def worst(self) -> PredictedCategory | None:
        """The category with the largest error."""
        return max(self.categories, key=lambda category: abs(category.error), default=None)

    @property
    def run_error(self) -> float | None:
        return relative_error(self.run_predicted, self.run_measured)

    @property
    def reserved_error(self) -> float | None:
        return relative_error(self.reserved_predicted, self.reserved_measured)


def relative_error(predicted: int | None, measured: int | None) -> float | None:
    """(predicted - measured) / measured; None where one of them is missing."""
    return predicted / measured - 1 if predicted and measured else None


def read_predictions(folder: Path, skipped: list[str]) -> dict[str, Prediction]:
    """Spec key -> prediction, of every run folder that has one; its name ends in the key.

    Args:
        skipped: takes a line for each file that is no prediction.
    """
    predictions = {}
    for path in sorted(Path(folder).glob(f"runs/*/{FILE}")):
        try:
            predictions[path.parent.name.rpartition("-")[2]] = load(path)
        except BadFile as error:
            skipped.append(str(error))
    return predictions


def predicted_and_measured(
    results: Sequence[Result],
    predictions: Mapping[str, Prediction],
    found: Calibration | None = None,
) -> PredictedAndMeasured | None:
    """The prediction for a row beside its first repetition; None where nothing was predicted.
    ``found``: the calibration of the device."""
    known = [predictions[r.spec.key] for r in results if r.spec.key in predictions]
    if not known:
        return None
    prediction, first = known[0], results[0]
    rank = first.ranks[prediction.rank : prediction.rank + 1]
    step, traced = prediction.steady, rank[0].categories if rank else None
    beside = library_bytes(first, found)
    hosted = prediction.host_steady
    return PredictedAndMeasured(
        method=prediction.method,
        reason=prediction.reason or None,
        step_predicted=step.bytes if step else None,
        step_measured=traced.total if traced else None,
        categories=_categories(prediction, first) if step and traced else (),
        hosted_predicted=hosted.bytes or None if hosted else None,
        hosted_measured=derive.hosted_bytes(rank),
        run_predicted=_plus(prediction.bytes, beside),
        run_measured=derive.highest(first.ranks, "allocated"),
        reserved_predicted=_plus(reserved_bytes(prediction, first), beside),
        reserved_measured=derive.highest(first.ranks, "reserved"),
        sent=_sent(prediction, first),
    )


def _sent(prediction: Prediction, first: Result) -> Sent | None:
    spec = first.spec
    return sent(prediction.work, spec.ranks, spec.local_processes) if prediction.work else None


def _categories(prediction: Prediction, result: Result) -> tuple[PredictedCategory, ...]:
    step = as_measured(prediction.steady, prediction.buckets)
    return predicted_categories(step, result.ranks[prediction.rank].categories)


def predicted_categories(
    predicted: Categories, measured: Categories
) -> tuple[PredictedCategory, ...]:
    """The categories that are, or were predicted to be, above 5 % of the measured peak."""
    every = (
        PredictedCategory(
            name=name, predicted=getattr(predicted, name), measured=getattr(measured, name)
        )
        for name in CATEGORIES
    )
    least = LEAST_SHARE * measured.total
    return tuple(
        category for category in every if max(category.predicted, category.measured) > least
    )


def library_bytes(result: Result, found: Calibration | None = None) -> int:
    """What libraries take out of the caching allocator, which no trace shows; 0 on a CPU."""
    if result.meter != "cuda":
        return 0
    return workspace.libraries(calibrated.of_environment(result.environment, found))


def reserved_bytes(prediction: Prediction, result: Result) -> int | None:
    """What the allocator was predicted to reserve in the mode in which it ran; None for another
    allocator than torch's own."""
    settings = str(result.environment.get("allocator") or "").replace(" ", "")
    if "backend:cudaMallocAsync" in settings:
        return None
    # torch takes the last of a setting that is given twice.
    modes = re.findall(r"expandable_segments:(\w+)", settings)
    expandable = modes[-1:] == ["True"]
    return prediction.reserved_expandable if expandable else prediction.reserved


def _plus(size: int | None, more: int) -> int | None:
    return None if size is None else size + more

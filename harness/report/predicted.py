"""Predicted beside measured: what was predicted for a row, what was found, and the errors."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.portrait import CATEGORIES
from harness.predict import gpus, workspace
from harness.predict.peak import as_measured
from harness.predict.prediction import Prediction, load
from harness.report import derive
from harness.result import Categories, Result

if TYPE_CHECKING:
    from harness.report.rows import Group

__all__ = ["FILE", "Compared", "Part", "compare", "parts", "read_predictions", "summary"]

FILE = "prediction.json"
"""Beside a run's result."""
LEAST_SHARE = 0.05
"""Of the traced peak: a category with less is not compared."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A category at the peak of a step, in bytes; its error is a plain fraction, infinite where
    the run had nothing of the category."""

    name: str
    predicted: int
    measured: int

    @property
    def title(self) -> str:
        return "EMA" if self.name == "ema" else self.name.replace("_", " ")

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else math.inf


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One row's prediction against its measurement. Bytes; errors as plain fractions.

    ``step_*``: live tensors at the peak of one later step, against the run's own trace of one
    (rank 0, which the prediction stands for), and ``parts`` by category. ``peak_*``: of the whole
    run, against the meter's peak: on a GPU the caching allocator's, which holds the workspaces of
    libraries too, without one the resident high-water mark. ``reserved_*``: a GPU's allocator, in
    the mode in which it ran.
    """

    method: str
    reason: str | None
    step_predicted: int | None
    step_measured: int | None
    parts: tuple[Part, ...]
    peak_predicted: int | None
    peak_measured: int | None
    reserved_predicted: int | None
    reserved_measured: int | None

    @property
    def step_error(self) -> float | None:
        return error(self.step_predicted, self.step_measured)

    @property
    def worst(self) -> Part | None:
        """The category with the largest error."""
        return max(self.parts, key=lambda part: abs(part.error), default=None)

    @property
    def peak_error(self) -> float | None:
        return error(self.peak_predicted, self.peak_measured)

    @property
    def reserved_error(self) -> float | None:
        return error(self.reserved_predicted, self.reserved_measured)


def error(predicted: int | None, measured: int | None) -> float | None:
    """(predicted - measured) / measured; None where one of them is missing."""
    return predicted / measured - 1 if predicted and measured else None


def read_predictions(folder: Path) -> dict[str, Prediction]:
    """Spec key -> prediction, of every run folder that has one; its name ends in the key."""
    found = {}
    for path in sorted(Path(folder).glob(f"runs/*/{FILE}")):
        prediction = load(path)
        if prediction is not None:
            found[path.parent.name.rpartition("-")[2]] = prediction
    return found


def compare(results: Sequence[Result], predictions: Mapping[str, Prediction]) -> Compared | None:
    """A row's prediction against its first repetition; None where nothing was predicted."""
    known = [predictions[r.spec.key] for r in results if r.spec.key in predictions]
    if not known:
        return None
    found, first = known[0], results[0]
    traced = first.ranks[0].categories if first.ranks else None
    deepspeed = bool(first.configs.get("deepspeed"))
    steady = as_measured(found.steady, deepspeed=deepspeed) if found.steady else None
    beside = libraries(first)
    return Compared(
        method=found.method,
        reason=found.reason or None,
        step_predicted=found.steady.bytes if found.steady else found.closed_form,
        step_measured=traced.total if traced else None,
        parts=parts(steady, traced) if steady and traced else (),
        peak_predicted=_plus(found.bytes, beside),
        peak_measured=derive.peak_of(first.ranks),
        reserved_predicted=_plus(reserved(found, first), beside),
        reserved_measured=derive.peak_of(first.ranks, "reserved"),
    )


def parts(predicted: Categories, measured: Categories) -> tuple[Part, ...]:
    """The categories that are, or were predicted to be, above 5 % of the measured peak."""
    every = (
        Part(name=name, predicted=getattr(predicted, name), measured=getattr(measured, name))
        for name in CATEGORIES
    )
    least = LEAST_SHARE * measured.total
    return tuple(part for part in every if max(part.predicted, part.measured) > least)


def libraries(result: Result) -> int:
    """Bytes that libraries take out of the caching allocator, which no trace shows; 0 on a CPU."""
    if result.meter != "cuda":
        return 0
    return workspace.libraries(gpus.named(str(result.environment.get("device") or "")))


def reserved(prediction: Prediction, result: Result) -> int | None:
    """What the allocator was predicted to reserve in the mode in which it ran; None for another
    allocator than torch's own."""
    settings = str(result.environment.get("allocator") or "").replace(" ", "")
    if "backend:cudaMallocAsync" in settings:
        return None
    # torch takes the last of a setting that is given twice.
    modes = re.findall(r"expandable_segments:(\w+)", settings)
    growing = modes[-1:] == ["True"]
    return prediction.reserved_expandable if growing else prediction.reserved


def _plus(size: int | None, more: int) -> int | None:
    return None if size is None else size + more


def summary(group: Group) -> str:
    """The errors of a group in a sentence; empty where nothing was predicted."""
    rows = [row.predicted for row in group.rows if row.predicted]
    meter = "the allocator's peak" if group.meter == "cuda" else "the resident peak"
    said = [
        _spread("tensors of a step, against the run's own trace", [r.step_error for r in rows]),
        _categories(group),
        _spread(f"whole run, against {meter}", [r.peak_error for r in rows]),
        _spread("reserved", [r.reserved_error for r in rows]),
    ]
    lost = [row.label for row in group.rows if row.predicted and row.predicted.method == "none"]
    said += [f"not predicted: {', '.join(lost)}"] if lost else []
    text = "; ".join(one for one in said if one)
    return f"Predicted without running: {text}." if text else ""


def _categories(group: Group) -> str:
    """The errors of all categories of all rows, and where the largest is."""
    every = [(part, row) for row in group.rows if row.predicted for part in row.predicted.parts]
    worst, row = max(every, key=lambda pair: abs(pair[0].error), default=(None, None))
    if worst is None:
        return ""
    where = f"{worst.title} of {row.label}"
    name = "its categories above 5 % of the peak"
    return _spread(name, [part.error for part, _ in every], f"{where}; {len(every)} values")


def _spread(name: str, errors: Sequence[float | None], where: str = "") -> str:
    """Median, and the worst, of the absolute errors."""
    known = [abs(e) for e in errors if e is not None]
    if not known:
        return ""
    middle, worst = 100 * statistics.median(known), 100 * max(known)
    counted = where or f"{len(known)} rows"
    return f"{name}: median error {middle:.2f} %, largest {worst:.2f} % ({counted})"

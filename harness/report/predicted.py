"""Predicted beside measured: what was predicted for a row, what was found, and the errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.predict.prediction import Prediction, load
from harness.report import derive
from harness.result import Result

if TYPE_CHECKING:
    from harness.report.rows import Group

__all__ = ["FILE", "Compared", "compare", "read_predictions", "summary"]

FILE = "prediction.json"
"""Beside a run's result."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One row's prediction against its measurement. Bytes; errors as plain fractions.

    ``step_*``: live tensors at the peak of one later step, against the run's own trace of one
    (rank 0, which the prediction stands for). ``peak_*``: of the whole run, against the meter's
    peak: on a GPU the caching allocator's, without one the resident high-water mark.
    ``reserved_*``: a GPU's allocator.
    """

    method: str
    reason: str | None
    step_predicted: int | None
    step_measured: int | None
    peak_predicted: int | None
    peak_measured: int | None
    reserved_predicted: int | None
    reserved_measured: int | None

    @property
    def step_error(self) -> float | None:
        return error(self.step_predicted, self.step_measured)

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
    found, ranks = known[0], results[0].ranks
    traced = ranks[0].categories if ranks else None
    return Compared(
        method=found.method,
        reason=found.reason or None,
        step_predicted=found.steady.bytes if found.steady else found.closed_form,
        step_measured=traced.total if traced else None,
        peak_predicted=found.bytes,
        peak_measured=derive.peak_of(ranks),
        reserved_predicted=found.reserved,
        reserved_measured=derive.peak_of(ranks, "reserved"),
    )


def summary(group: Group) -> str:
    """The errors of a group in a sentence; empty where nothing was predicted."""
    rows = [row.predicted for row in group.rows if row.predicted]
    meter = "the allocator's peak" if group.meter == "cuda" else "the resident peak"
    parts = [
        _spread("tensors of a step, against the run's own trace", [r.step_error for r in rows]),
        _spread(f"whole run, against {meter}", [r.peak_error for r in rows]),
        _spread("reserved", [r.reserved_error for r in rows]),
    ]
    lost = [row.label for row in group.rows if row.predicted and row.predicted.method == "none"]
    parts += [f"not predicted: {', '.join(lost)}"] if lost else []
    said = "; ".join(part for part in parts if part)
    return f"Predicted without running: {said}." if said else ""


def _spread(name: str, errors: Sequence[float | None]) -> str:
    """Median, and the worst, of the absolute errors."""
    known = [abs(e) for e in errors if e is not None]
    if not known:
        return ""
    middle, worst = 100 * derive.quantile(known, 0.5), 100 * max(known)
    return f"{name}: median error {middle:.2f} %, largest {worst:.2f} % ({len(known)} rows)"

"""Predictions beside measurements, as plain figures: memory of a step and a run, fit, and times.

The planner computes them (hook "compare_with_predictions"). Without it no row has any. The hook
takes the repetitions of one row, their status, and the predictions by the spec's key. It also takes
machine facts that a failed run could not record, and the calibration beside the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.result import Result, Status

OUT_OF_MEMORY = (Status.GPU_OOM, Status.HOST_OOM)
Machines = Mapping[str, Mapping[str, Any]]
"""Device -> environment facts of a set's results."""


@dataclass(frozen=True, kw_only=True)
class PredictedAndMeasured:
    """One row's prediction and measurement, in bytes; errors are fractions.

    ``step_*``: live tensors on the device at the peak of a later step, against the run's own
    trace of the predicted rank. ``hosted_*``: the same of tensors in host memory.

    ``run_*``: the whole run with set-up, against the meter's highest. On a GPU that is the
    caching allocator's count, which includes libraries' workspaces; on a CPU, the resident mark
    against tensors of both placements. ``reserved_*``: bytes reserved by a GPU's allocator in
    its mode.
    """

    method: str
    reason: str | None
    step_predicted: int | None
    step_measured: int | None
    hosted_predicted: int | None
    hosted_measured: int | None
    run_predicted: int | None
    run_measured: int | None
    reserved_predicted: int | None
    reserved_measured: int | None

    @property
    def step_error(self) -> float | None:
        return relative_error(self.step_predicted, self.step_measured)

    @property
    def run_error(self) -> float | None:
        return relative_error(self.run_predicted, self.run_measured)


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """Return (predicted - measured) / measured; None if one of them is missing."""
    return predicted / measured - 1 if predicted and measured else None


@dataclass(frozen=True, kw_only=True)
class PredictedFit:
    """The least memory predicted for a row and the available memory, in bytes; the verdict."""

    need_bytes: int
    have_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Seconds of a step: predicted by this device's calibration, and measured.

    ``low_seconds`` and ``high_seconds``: their range. ``words``: the calibration's device and date.
    """

    predicted_seconds: float | None
    low_seconds: float | None
    high_seconds: float | None
    measured_seconds: float
    words: str

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        return relative_error(self.predicted_seconds, self.measured_seconds)


class Predicted(NamedTuple):
    """The predictions for one row beside its measurement. An unknown part is None."""

    memory: PredictedAndMeasured | None = None
    fit: PredictedFit | None = None
    times: Calibrated | None = None


def machine_facts(results: Iterable[Result]) -> Machines:
    """Return device (cpu or cuda) -> the environment facts that any of the results has."""
    machines: dict[str, dict[str, Any]] = {}
    for result in results:
        machines.setdefault(result.spec.device, {}).update(result.environment)
    return machines

"""Predictions compared with measurements: memory of a step and a run, fit, and calibrated times.
Hooks of the report. ``found`` is the calibration beside the results, used if it is of the device
that measured them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.planner import overhead
from harness.planner.calibration.record import Calibration, load
from harness.planner.speed import rates
from harness.planner.speed.roofline import seconds
from harness.planner.verdict import decide
from harness.prediction import Prediction
from harness.report.figures import derive
from harness.report.figures.predicted import (
    Calibrated,
    Machines,
    Predicted,
    PredictedAndMeasured,
    PredictedFit,
)
from harness.result import Result, Status
from strategies import parse


def compare_with_predictions(
    results: Sequence[Result],
    status: Status,
    predictions: Mapping[str, Prediction],
    machines: Machines,
    found: Calibration | None = None,
) -> Predicted:
    """Return the predictions beside one row's repetitions; only the fit if it ran out of memory."""
    first, ran = results[0], status is Status.OK
    prediction = predictions.get(first.spec.key)
    return Predicted(
        memory=predicted_and_measured(results, predictions, found) if ran else None,
        fit=predicted_fit(first, status, prediction, machines, found),
        times=calibrated_row(results, prediction, found) if ran else None,
    )


def predicted_and_measured(
    results: Sequence[Result],
    predictions: Mapping[str, Prediction],
    found: Calibration | None = None,
) -> PredictedAndMeasured | None:
    """Return the prediction for a row with its first repetition; None without a prediction."""
    known = [predictions[r.spec.key] for r in results if r.spec.key in predictions]
    if not known:
        return None
    prediction, first = known[0], results[0]
    rank = first.ranks[prediction.rank : prediction.rank + 1]
    step, traced = prediction.steady, rank[0].categories if rank else None
    # What libraries take from torch's allocator, which no trace sees.
    gpu = rates.of_environment(first.environment, found)
    library_bytes = overhead.libraries(gpu) if first.meter == "cuda" else 0
    hosted = prediction.host_steady
    return PredictedAndMeasured(
        method=prediction.method,
        reason=prediction.reason or None,
        step_predicted=step.bytes if step else None,
        step_measured=traced.total if traced else None,
        hosted_predicted=hosted.bytes or None if hosted else None,
        hosted_measured=derive.hosted_bytes(rank),
        run_predicted=_plus(prediction.bytes, library_bytes),
        run_measured=derive.highest(first.ranks, "allocated"),
        reserved_predicted=_plus(reserved_bytes(prediction, first), library_bytes),
        reserved_measured=derive.highest(first.ranks, "reserved"),
    )


def reserved_bytes(prediction: Prediction, result: Result) -> int | None:
    """Return the bytes that the allocator was predicted to reserve in its mode.
    None for another allocator than torch's own."""
    settings = str(result.environment.get("allocator") or "").replace(" ", "")
    if "backend:cudaMallocAsync" in settings:
        return None
    # torch uses the last value of a repeated setting.
    modes = re.findall(r"expandable_segments:(\w+)", settings)
    expandable = modes[-1:] == ["True"]
    return prediction.reserved_expandable if expandable else prediction.reserved


def _plus(size: int | None, more: int) -> int | None:
    return None if size is None else size + more


# ---- predicted fit ----
# The prediction for a row and the memory in which it ran, without uncertainty.


def predicted_fit(
    result: Result,
    status: Status,
    prediction: Prediction | None,
    machines: Machines,
    found: Calibration | None = None,
) -> PredictedFit | None:
    """Return the prediction for one run with the memory of its device; None if one is unknown.
    It is the host's memory if that ran out, or if the device is a CPU. ``machines``
    (``machine_facts``) has facts that a failed run could not record; ``found`` is the calibration
    of its device."""
    if prediction is None:
        return None
    # The run's own facts have priority.
    facts = {**machines.get(result.spec.device, {}), **result.environment}
    on_cpu = result.spec.device == "cpu"
    on_host, need = on_cpu or status is Status.HOST_OOM, prediction.least
    if on_host:  # of all processes of one machine, without interpreters and libraries
        need = prediction.bytes if on_cpu else prediction.host and prediction.host.bytes
        need = need and need * result.spec.local_processes
    elif need:
        gpu = rates.of_environment(facts, found)
        sharding = parse(result.spec.recipe).sharding.name
        need += overhead.fixed_overhead(gpu, result.spec.processes, sharding).total
    names = ("memory_bytes", "container_bytes") if on_host else ("device_bytes",)
    have = min((int(facts[name]) for name in names if facts.get(name)), default=None)
    if not need or not have:
        return None
    return PredictedFit(need_bytes=need, have_bytes=have, fits=decide(need, need, have) == "fits")


def read_calibration(folder: Path) -> Calibration | None:
    """Return the calibration beside the results in ``folder``, or None if there is none.

    Raises:
        BadInput: the file is no calibration.
    """
    path = Path(folder) / rates.FILE
    return load(path) if path.exists() else None


def calibrated_row(
    results: Sequence[Result], prediction: Prediction | None, found: Calibration | None
) -> Calibrated | None:
    """Return a row's times by its device's calibration.
    None without one, and on several machines, whose network no calibration has measured."""
    first, predicted = results[0], None
    card = rates.of_environment(first.environment, found)
    if card is None or card.calibrated is None or first.spec.nodes > 1:
        return None
    if prediction and prediction.work:
        predicted = seconds(prediction.work, card, first.spec.processes, first.spec.recipe)
    return Calibrated(
        predicted_seconds=predicted and predicted.total,
        low_seconds=predicted and predicted.low,
        high_seconds=predicted and predicted.high,
        measured_seconds=derive.quantile([s for r in results for s in derive.step_seconds(r)], 0.5),
        words=card.calibrated.words,
    )

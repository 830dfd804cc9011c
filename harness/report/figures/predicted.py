"""Predictions compared with measurements: memory of a step and a run, fit, and calibrated times."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.json_files import BadFile
from harness.memory.record import as_measured
from harness.planner import overhead
from harness.planner.calibration.record import Calibration
from harness.planner.calibration.record import load as load_calibration
from harness.planner.prediction import Prediction, load
from harness.planner.speed import rates
from harness.planner.speed.cards import Card
from harness.planner.speed.roofline import Seconds, Sent, in_tf32, seconds, sent
from harness.planner.verdict import decide
from harness.report.figures import derive, units
from harness.report.figures.units import CATEGORIES
from harness.result import Categories, Result, Status

FILE = "prediction.json"
"""File of the prediction in a run's folder."""
LEAST_SHARE = 0.05
"""Share of the traced peak below which a category is not compared."""
LEAST_HOSTED = 2**20
"""Bytes of host memory from which its prediction is judged."""


@dataclass(frozen=True, kw_only=True)
class PredictedCategory:
    """A category at the peak of a step, in bytes.

    Its error is a fraction, infinite if the run had nothing of the category.
    """

    name: str
    predicted: int
    measured: int

    @property
    def title(self) -> str:
        """The category's name in a sentence."""
        return units.in_sentence(self.name)

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else math.inf


@dataclass(frozen=True, kw_only=True)
class PredictedAndMeasured:
    """One row's prediction and measurement, in bytes; errors are fractions.

    ``step_*``: live tensors on the device at the peak of a later step, against the run's own
    trace of the predicted rank; ``categories`` has the same by category. ``hosted_*``: the same
    of tensors in host memory.

    ``run_*``: the whole run with set-up, against the meter's highest. On a GPU that is the
    caching allocator's count, which includes libraries' workspaces; on a CPU, the resident mark
    against tensors of both placements. ``reserved_*``: bytes reserved by a GPU's allocator in
    its mode. ``sent``: predicted bytes that a rank sends in a step; None without a trace.
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
        """The relative error; None below ``LEAST_HOSTED``, which a few pinned samples reach."""
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
    """Return (predicted - measured) / measured; None if one of them is missing."""
    return predicted / measured - 1 if predicted and measured else None


def read_predictions(folder: Path, skipped: list[str]) -> dict[str, Prediction]:
    """Return spec key -> prediction, for every run folder that has one; its name ends in the key.

    Args:
        skipped: collects a line for each file that is no prediction.
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
    """Return the prediction for a row with its first repetition; None without a prediction.

    ``found``: the calibration of the device.
    """
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
    """Return the categories above 5 % of the measured peak, predicted or measured."""
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
    """Return the bytes that libraries take from the caching allocator, invisible to a trace; 0 on
    a CPU.
    """
    if result.meter != "cuda":
        return 0
    return overhead.libraries(rates.of_environment(result.environment, found))


def reserved_bytes(prediction: Prediction, result: Result) -> int | None:
    """Return the bytes that the allocator was predicted to reserve in its mode.

    None for another allocator than torch's own.
    """
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


OUT_OF_MEMORY = (Status.GPU_OOM, Status.HOST_OOM)


Machines = Mapping[str, Mapping[str, Any]]
"""Device -> environment facts of a set's results."""


@dataclass(frozen=True, kw_only=True)
class PredictedFit:
    """The least memory predicted for a row, and the available memory, in bytes."""

    need_bytes: int
    have_bytes: int

    @property
    def fits(self) -> bool:
        return decide(self.need_bytes, self.need_bytes, self.have_bytes) == "fits"


def predicted_fit(
    result: Result,
    status: Status,
    prediction: Prediction | None,
    machines: Machines,
    found: Calibration | None = None,
) -> PredictedFit | None:
    """Return the prediction for one run with the memory of its device; None if one is unknown.

    It is the host's memory if that ran out, or if the device is a CPU. ``machines``
    (``machine_facts``) has facts that a failed run could not record; ``found`` is the
    calibration of its device.
    """
    if prediction is None:
        return None
    facts = {
        **machines.get(result.spec.device, {}),
        **result.environment,
    }  # the run's own facts have priority
    on_host = result.spec.device == "cpu" or status is Status.HOST_OOM
    beside = _beside(result, facts, found)
    need = _host_need(prediction, result) if on_host else _device_need(prediction, beside)
    names = ("memory_bytes", "container_bytes") if on_host else ("device_bytes",)
    have = min((int(facts[name]) for name in names if facts.get(name)), default=None)
    return PredictedFit(need_bytes=need, have_bytes=have) if need and have else None


def machine_facts(results: Iterable[Result]) -> Machines:
    """Return device (cpu or cuda) -> the environment facts that any of the results has."""
    machines: dict[str, dict[str, Any]] = {}
    for result in results:
        machines.setdefault(result.spec.device, {}).update(result.environment)
    return machines


def _beside(result: Result, facts: Mapping[str, Any], found: Calibration | None) -> int:
    """Return the bytes of fixed overhead on a GPU."""
    gpu = rates.of_environment(facts, found)
    return overhead.standing(gpu, result.spec.processes).total


def _device_need(prediction: Prediction, beside: int) -> int | None:
    """Return the least bytes of a GPU, with the fixed overhead ``beside``.

    It is the minimum after the allocator has freed its cache, as ``plan`` counts it.
    """
    return None if prediction.least is None else prediction.least + beside


def _host_need(prediction: Prediction, result: Result) -> int | None:
    """Return the bytes of all processes of one machine, without interpreters and libraries."""
    on_cpu = result.spec.device == "cpu"
    process_bytes = prediction.bytes if on_cpu else prediction.host and prediction.host.bytes
    return process_bytes and process_bytes * result.spec.local_processes


# ---- calibrated times ----


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Seconds of a step: predicted by this device's calibration, with its spread, and measured.

    ``typical``: predicted by typical figures, for comparison. ``peak_fraction``: the model's
    FLOP/s over the matrix products measured on the device, in the row's type. ``words``: the
    calibration's device and date.
    """

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
        """The error of typical figures."""
        return self._error(self.typical)

    def _error(self, found: Seconds | None) -> float | None:
        return found.total / self.measured_seconds - 1 if found else None


def read_calibration(folder: Path) -> Calibration | None:
    """Return the calibration beside the results in ``folder``, or None if there is none.

    Raises:
        BadInput: the file is no calibration.
    """
    path = Path(folder) / rates.FILE
    return load_calibration(path) if path.exists() else None


def calibrated_row(
    results: Sequence[Result], prediction: Prediction | None, found: Calibration | None
) -> Calibrated | None:
    """Return a row's times by its device's calibration.

    None without one, for a simulated world, and on several machines, whose network no
    calibration has measured.
    """
    first = results[0]
    card = rates.of_environment(first.environment, found)
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
    tf32 = in_tf32(first.spec.recipe)
    return seconds(prediction.work, card, first.spec.processes, tf32)


def _peak_fraction(results: Sequence[Result], card: Card) -> float | None:
    """Return the share of the measured products: on a CPU of all processes, on a GPU of each."""
    first = results[0]
    kind = derive.precision(first.evidence)
    measured = card.calibrated.calibration.ceilings.products.get(kind or "")
    median = derive.quantile([s for r in results for s in derive.step_seconds(r)], 0.5)
    flops = derive.flops_per_second(first.flops_per_step, median)
    if not measured or not flops:
        return None
    return flops / measured / (1 if card.shared else len(first.ranks))

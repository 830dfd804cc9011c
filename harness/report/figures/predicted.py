"""Predicted beside measured: what was predicted for a row, what was measured, and the errors."""

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
from harness.planner.speed.roofline import Seconds, Sent, seconds, sent
from harness.planner.verdict import decide
from harness.report.figures import derive, units
from harness.report.figures.units import CATEGORIES
from harness.result import Categories, Result, Status

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
        return units.in_sentence(self.name)

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
    return overhead.libraries(rates.of_environment(result.environment, found))


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


# ---- predicted fit ----
# The prediction for a row against the memory that it ran in, without its uncertainty.


OUT_OF_MEMORY = (Status.GPU_OOM, Status.HOST_OOM)


Machines = Mapping[str, Mapping[str, Any]]
"""Device -> facts of the environment of a set's results."""


@dataclass(frozen=True, kw_only=True)
class PredictedFit:
    """The least memory that a row was predicted to run in, and what there was. Bytes."""

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
    """The prediction for one run against the memory of its device; against the host's where that
    ran out, or where the device is a CPU. None where one of the two is not known.

    ``machines`` (``machine_facts``) tell what a run that died could not; ``found`` is the
    calibration of its device.
    """
    if prediction is None:
        return None
    facts = {**machines.get(result.spec.device, {}), **result.environment}  # the run's own win
    on_host = result.spec.device == "cpu" or status is Status.HOST_OOM
    beside = _beside(result, facts, found)
    need = _host_need(prediction, result) if on_host else _device_need(prediction, beside)
    names = ("memory_bytes", "container_bytes") if on_host else ("device_bytes",)
    have = min((int(facts[name]) for name in names if facts.get(name)), default=None)
    return PredictedFit(need_bytes=need, have_bytes=have) if need and have else None


def machine_facts(results: Iterable[Result]) -> Machines:
    """Device (cpu or cuda) -> the facts of the environment that any of the results has."""
    machines: dict[str, dict[str, Any]] = {}
    for result in results:
        machines.setdefault(result.spec.device, {}).update(result.environment)
    return machines


def _beside(result: Result, facts: Mapping[str, Any], found: Calibration | None) -> int:
    """What stands beside the training on a GPU."""
    gpu = rates.of_environment(facts, found)
    return overhead.standing(gpu, result.spec.processes).total


def _device_need(prediction: Prediction, beside: int) -> int | None:
    """The least that the allocator can run in once it has given back its cache (as ``plan`` counts
    it), with what stands ``beside`` it on a GPU."""
    return None if prediction.least is None else prediction.least + beside


def _host_need(prediction: Prediction, result: Result) -> int | None:
    """Of all processes of one machine; without the interpreters and libraries."""
    on_cpu = result.spec.device == "cpu"
    process_bytes = prediction.bytes if on_cpu else prediction.host and prediction.host.bytes
    return process_bytes and process_bytes * result.spec.local_processes


# ---- calibrated ----
# A row's time beside the one that the calibration of its device predicts, and its share of the
# matrix products that were measured there.


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
    path = Path(folder) / rates.FILE
    return load_calibration(path) if path.exists() else None


def calibrated_row(
    results: Sequence[Result], prediction: Prediction | None, found: Calibration | None
) -> Calibrated | None:
    """A row beside its device's calibration; None without one, for a simulated world,
    and on several machines, whose network no calibration has measured."""
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

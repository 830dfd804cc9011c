"""The prediction for a row against the memory that it ran in, without its uncertainty."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.calibration.record import Calibration
from harness.predict import workspace
from harness.predict.prediction import Prediction
from harness.predict.speed import calibrated
from harness.predict.verdict import decide
from harness.result import Result, Status

__all__ = ["OUT_OF_MEMORY", "PredictedFit", "machine_facts", "predicted_fit"]

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
    gpu = calibrated.of_environment(facts, found)
    return workspace.standing(gpu, result.spec.processes).total


def _device_need(prediction: Prediction, beside: int) -> int | None:
    """The least that the allocator can run in once it has given back its cache (as ``plan`` counts
    it), with what stands ``beside`` it on a GPU."""
    return None if prediction.least is None else prediction.least + beside


def _host_need(prediction: Prediction, result: Result) -> int | None:
    """Of all processes of one machine; without the interpreters and libraries."""
    on_cpu = result.spec.device == "cpu"
    process_bytes = prediction.bytes if on_cpu else prediction.host and prediction.host.bytes
    return process_bytes and process_bytes * result.spec.local_processes

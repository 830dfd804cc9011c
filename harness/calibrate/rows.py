"""A row that was run and predicted, as a calibration has it. Pure; no torch."""

from __future__ import annotations

from harness.calibration.record import Calibration, Ceilings, Device, MeasuredRow, StandingBytes
from harness.calibration.store import Applied
from harness.predict.prediction import Prediction
from harness.predict.speed import cards
from harness.predict.speed.rates import rates
from harness.predict.speed.roofline import parts_of, seconds
from harness.report.figures import derive
from harness.report.figures.predicted import predicted_and_measured
from harness.result import Result, Status

__all__ = ["measured_row"]


def measured_row(
    result: Result,
    prediction: Prediction | None,
    device: Device,
    ceilings: Ceilings,
    standing: StandingBytes,
) -> MeasuredRow:
    """``result`` beside its prediction, timed by these ceilings alone."""
    spec, (status, reason) = result.spec, derive.effective_status(result)
    found = {
        "recipe": spec.recipe,
        "model": spec.model,
        "processes": spec.processes,
        "global_batch": spec.global_batch,
        "world": spec.world,
        "status": status.value,
        "reason": reason or "",
    }
    if status is not Status.OK:
        return MeasuredRow(**found)
    found |= _measured(result)
    if prediction is None or prediction.method == "none":
        why = prediction.reason if prediction else "it was not predicted"
        return MeasuredRow(**found | {"reason": f"not predicted: {why}"})
    alone = Calibration(device=device, measured="", ceilings=ceilings, standing=standing)
    return MeasuredRow(
        **found, **_parts(result, prediction, alone), **_bytes(result, prediction, alone)
    )


def _measured(result: Result) -> dict[str, object]:
    median = derive.quantile(derive.step_seconds(result), 0.5)
    return {
        "step_seconds": median,
        "flops_per_second": derive.flops_per_second(result.flops_per_step, median),
        "precision": derive.precision(result.evidence) or "",
        "needs_bytes": derive.need_bytes(result.ranks, result.meter),
    }


def _parts(result: Result, prediction: Prediction, alone: Calibration) -> dict[str, float]:
    """Seconds of each part at the ceilings, which a calibration without rows has; and of the whole
    by typical figures."""
    if not prediction.work:
        return {}
    typical = cards.of_device(alone.device)
    card = cards.with_calibration(typical, Applied(calibration=alone))
    processes = result.spec.processes
    tf32 = "tf32" in result.spec.recipe.split("+")
    parts = parts_of(prediction.work, rates(card, processes), processes, tf32)
    usual = seconds(prediction.work, typical, processes, tf32).total
    return {**parts, "typical_seconds": usual}


def _bytes(result: Result, prediction: Prediction, alone: Calibration) -> dict[str, object]:
    pair = predicted_and_measured([result], {result.spec.key: prediction}, alone)
    if pair is None:
        return {}
    known = {
        "step": (pair.step_predicted, pair.step_measured),
        "run": (pair.run_predicted, pair.run_measured),
        "reserved": (pair.reserved_predicted, pair.reserved_measured),
    }
    return {
        **{name: list(both) for name, both in known.items() if all(both)},
        "categories": {c.name: [c.predicted, c.measured] for c in pair.categories},
    }

"""Rows to which predicted times are fitted: their specs, and their predictions. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.planner.calibration.record import (
    Calibration,
    Ceilings,
    Device,
    MeasuredRow,
    StandingBytes,
)
from harness.planner.calibration.store import Applied
from harness.planner.speed.rates import of_device, rates
from harness.planner.speed.roofline import compiles, in_tf32, issues, parts_of, seconds
from harness.prediction import Prediction
from harness.report.figures import derive
from harness.result import Result, Status
from harness.spec import Spec
from harness.suite import matrix
from harness.void import shown_status
from strategies import parse

HOST_BOUND = ("single+bf16", "single+bf16+checkpoint")
"""Recipes that train one sample on a GPU: the host issues their operations more slowly than it runs
them."""
RECIPES = {
    "cuda": (
        "single+bf16+checkpoint", "single+bf16", "single",
        "single+bf16+checkpoint+adam8bit", "zero2_offload+bf16+checkpoint",
        "ddp+bf16", "zero2+bf16+checkpoint", "zero3+bf16+checkpoint",
        "zero3_offload+bf16+checkpoint",
        "single+bf16+checkpoint+offload_activations:what=checkpoints", "single+bf16+compile",
    ),
    "cpu": (
        "single", "single+bf16", "single+checkpoint", "ddp", "zero2", "zero3", "zero2_offload",
        "single+bf16+checkpoint", "single+adam8bit", "zero3_offload", "ddp+bf16",
        "single+offload_activations", "single+compile",
    ),
}  # fmt: skip
"""Device -> recipes to run and predict."""
CPU_PROCESSES = 2
CPU_BATCH = 8
SMALL_MODEL = "DiT-T/8"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The properties of the machine on which stations and rows depend, and the options.
    ``gpu_bytes``: memory of the smallest GPU. ``small``: a rehearsal with tiny models and
    shapes."""

    device: str
    gpus: int = 0
    gpu_bytes: int = 0
    small: bool = False

    @property
    def processes(self) -> int:
        """The processes of a multi-process recipe."""
        return self.gpus if self.device == "cuda" else CPU_PROCESSES


def specs(setting: Setting) -> list[Spec]:
    """Return the rows that this machine can run.
    On one GPU replicas equal plain training, and shards are whole; an offload is still useful."""
    on_gpu, small = setting.device == "cuda", setting.small
    usual: dict[str, Any] = {
        "model": SMALL_MODEL if small else "DiT-XL/2" if on_gpu else "DiT-S/4",
        "data": "synthetic",
        "steps": 1 if small else 10 if on_gpu else 5,
        "warmup": 1 if small else 3 if on_gpu else 2,
    }
    batch = CPU_BATCH
    if on_gpu and not small:  # what fits in plain training
        batch = matrix.fitting_batch(usual, setting.gpu_bytes, 1)
    wanted = [(text, 1, 1) for text in HOST_BOUND] if on_gpu else []
    for text in RECIPES[setting.device]:
        alone = parse(text).alone(setting.device)
        if alone or setting.processes > 1 or "offload" in text:
            wanted.append((text, batch, 1 if alone else setting.processes))
    usual |= {"device": setting.device}
    rows = [
        Spec(recipe=parse(text).text, global_batch=each * many, processes=many, **usual)
        for text, each, many in wanted
    ]
    return list(dict.fromkeys(rows))


def measured_rows(
    results: Sequence[Result],
    predictions: Mapping[str, Prediction],
    device: Device,
    ceilings: Ceilings,
    standing: StandingBytes,
) -> list[MeasuredRow]:
    """Return each result with its prediction, timed by these ceilings alone.
    ``predictions`` are by the key of a spec."""
    alone = Calibration(device=device, measured="", ceilings=ceilings, standing=standing)
    return [_measured(result, predictions.get(result.spec.key), alone) for result in results]


def _measured(result: Result, prediction: Prediction | None, alone: Calibration) -> MeasuredRow:
    spec, (status, reason) = result.spec, shown_status(result)
    row = MeasuredRow(
        recipe=spec.recipe,
        model=spec.model,
        processes=spec.processes,
        global_batch=spec.global_batch,
        status=status.value,
        reason=reason or "",
    )
    if status is not Status.OK:
        return row
    median = derive.quantile(derive.step_seconds(result), 0.5)
    row = dataclasses.replace(row, step_seconds=median)
    if prediction is None or prediction.method == "none":
        why = prediction.reason if prediction else "it was not predicted"
        return dataclasses.replace(row, reason=f"not predicted: {why}")
    if not prediction.work:
        return row
    typical = of_device(alone.device)
    card = dataclasses.replace(typical, calibrated=Applied(calibration=alone))
    processes, work = spec.processes, prediction.work
    parts = parts_of(work, rates(card, processes), processes, in_tf32(spec.recipe))
    usual = seconds(work, typical, processes, spec.recipe).total
    count = 0 if card.shared else round(issues(work, compiles(spec.recipe)))
    return dataclasses.replace(row, **parts, typical_seconds=usual, operations=count)

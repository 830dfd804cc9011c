"""Was a row predicted to fit the memory it ran in? Right and wrong verdicts, counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.predict import gpus, workspace
from harness.predict.prediction import MARGIN, Prediction
from harness.result import Result, Status

if TYPE_CHECKING:
    from harness.report.rows import Report

__all__ = ["OUT_OF_MEMORY", "Verdict", "judge", "summary"]

OUT_OF_MEMORY = (Status.GPU_OOM, Status.HOST_OOM)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The least memory that a row was predicted to run in, and what there was. Bytes."""

    need_bytes: int
    have_bytes: int

    @property
    def fits(self) -> bool:
        return self.need_bytes <= self.have_bytes


def judge(
    result: Result, status: Status, prediction: Prediction | None, others: Sequence[Result]
) -> Verdict | None:
    """The verdict on one run: on the memory of its device, or on the host's where that ran out
    or is the device. What a run that died did not tell of its machine, ``others`` of its set do.
    """
    if prediction is None:
        return None
    facts = _facts(result, others)
    on_host = result.spec.device == "cpu" or status is Status.HOST_OOM
    need = _host_need(prediction, result) if on_host else _device_need(prediction, result, facts)
    names = ("memory_bytes", "container_bytes") if on_host else ("device_bytes",)
    have = min((int(facts[name]) for name in names if facts.get(name)), default=None)
    return Verdict(need_bytes=need, have_bytes=have) if need and have else None


def _facts(result: Result, others: Iterable[Result]) -> Mapping[str, Any]:
    alike = (one.environment for one in others if one.spec.device == result.spec.device)
    merged: dict[str, Any] = {}
    for facts in (*alike, result.environment):
        merged |= facts
    return merged


def _device_need(prediction: Prediction, result: Result, facts: Mapping[str, Any]) -> int | None:
    """With what the allocator gives back before it fails, as ``plan`` has it."""
    gpu = gpus.named(str(facts.get("device") or ""))
    beside = workspace.standing(gpu, result.spec.processes).total
    if prediction.least is not None:
        return prediction.least + beside
    formula = prediction.closed_form
    return None if formula is None else int(formula * MARGIN) + beside


def _host_need(prediction: Prediction, result: Result) -> int | None:
    """Of all processes: they share one host. The interpreters and libraries are not in it."""
    on_cpu = result.spec.device == "cpu"
    each = prediction.bytes if on_cpu else prediction.host and prediction.host.bytes
    return each and each * result.spec.processes


def summary(report: Report) -> str:
    """How many rows that ran out of memory were predicted to, and how many that finished; empty
    where no row did either, or nothing was predicted."""
    lost = [one for one in report.unfinished if one.status in OUT_OF_MEMORY]
    ran = [row for group in report.groups for row in group.rows if row.fit]
    foreseen = [one for one in lost if one.fit and not one.fit.fits]
    feared = [row for row in ran if not row.fit.fits]
    if not any(one.fit for one in lost) and not feared:
        return ""
    missed = ", ".join(one.label for one in lost if one.fit and one.fit.fits)
    unknown = ", ".join(one.label for one in lost if not one.fit)
    notes = [f"predicted to fit: {missed}"] if missed else []
    notes += [f"not predicted: {unknown}"] if unknown else []
    said = [f"{len(foreseen)} of {len(lost)} rows that ran out of memory{_noted(notes)}"]
    said += [f"{len(feared)} of {len(ran)} rows that finished{_noted([r.label for r in feared])}"]
    return f"Predicted not to fit: {', '.join(said)}."


def _noted(notes: Sequence[str]) -> str:
    return f" ({'; '.join(notes)})" if notes else ""

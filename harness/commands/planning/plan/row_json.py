"""A row of a plan as JSON: what was derived of its prediction, and the prediction."""

from __future__ import annotations

import dataclasses
from typing import Any

from harness.commands.planning.plan.question import export_command
from harness.predict.speed.roofline import behind_attention, sent
from harness.predict.verdict import Fit

__all__ = ["fit_as_json"]


def fit_as_json(fit: Fit) -> dict[str, Any]:
    """One row: what was derived of its prediction for the card, and the prediction."""
    return {
        "recipe": fit.label,
        "processes": fit.resolved.spec.processes,
        "global_batch": fit.resolved.spec.global_batch,
        "verdict": fit.verdict,
        "lack": fit.lack,
        "export": export_command(fit),
        "need_bytes": fit.need_bytes,
        "binds": fit.binds,
        "phases": {name: one._asdict() for name, one in fit.phases.items()},
        "need_spread_bytes": fit.spread_bytes,
        "need_high_bytes": fit.most_bytes,
        "uncertainty": dataclasses.asdict(fit.uncertainty),
        "least_bytes": fit.least_bytes,
        "margin_bytes": fit.margin_bytes,
        "host_bytes_node": fit.host_bytes,
        "host_high_bytes_node": fit.host_most,
        "host_memory_node": fit.host_memory,
        "step_seconds": fit.seconds.total if fit.seconds else None,
        "step_seconds_spread": fit.seconds.spread if fit.seconds else None,
        "sent_bytes": sent(
            fit.prediction.work, fit.resolved.spec.processes, fit.gpu.node
        )._asdict(),
        "beside_attention_seconds": _passed(fit),
        "prediction": dataclasses.asdict(fit.prediction),
    }


def _passed(fit: Fit) -> dict[str, float]:
    """What is sent while attention is computed, and how much of it that hides."""
    spec = fit.resolved.spec
    taken, hid = behind_attention(fit.prediction.work, fit.gpu, spec.processes)
    return {"sent": taken, "hidden": hid}

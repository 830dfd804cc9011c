"""The calibration that a session's outcomes make. Pure; no torch."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from harness.calibrate.outcome import Outcome
from harness.calibrate.rows import measured_row
from harness.calibration.record import Calibration, Ceilings, Device, StandingBytes
from harness.json_files import build
from harness.predict.prediction import Prediction
from harness.result import Result

__all__ = ["calibration_of", "ceilings_of", "standing_of"]

CEILINGS = ("products", "model_products", "streams", "attention", "copies", "launch_seconds",
            "host_rate", "collective")  # fmt: skip
STANDING = ("context", "libraries", "communication")


def calibration_of(
    device: Device,
    outcomes: Sequence[Outcome],
    results: Sequence[Result],
    predictions: Mapping[str, Prediction],
    *,
    load: float = 0.0,
    today: str = "",
) -> Calibration:
    """What was measured of ``device``. ``predictions`` by the key of a spec; ``load``: how many
    cores other work kept busy."""
    ceilings, standing = ceilings_of(outcomes), standing_of(outcomes)
    rows = [
        measured_row(result, predictions.get(result.spec.key), device, ceilings, standing)
        for result in results
    ]
    return Calibration(
        device=device,
        measured=today or datetime.date.today().isoformat(),
        load=load,
        ceilings=ceilings,
        standing=standing,
        rows=rows,
        missing=_missing(outcomes),
    )


def ceilings_of(outcomes: Sequence[Outcome]) -> Ceilings:
    """The ceilings that stations found."""
    return build(Ceilings, _facts(outcomes, CEILINGS), "ceilings")


def standing_of(outcomes: Sequence[Outcome]) -> StandingBytes:
    """What stations found to stand beside a training."""
    return build(StandingBytes, _facts(outcomes, STANDING), "standing")


def _facts(outcomes: Sequence[Outcome], names: Sequence[str]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for outcome in outcomes:
        if outcome.status == "ok":
            merged |= {name: value for name, value in outcome.facts.items() if name in names}
    return merged


def _missing(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Station, or a type or kernel of one, -> why it has no numbers."""
    found: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.status != "ok":
            found[outcome.station] = f"{outcome.status}: {outcome.reason}"
        for name, why in (outcome.facts.get("missing") or {}).items():
            found[f"{outcome.station}: {name}"] = str(why)
    return found

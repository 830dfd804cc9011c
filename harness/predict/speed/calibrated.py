"""A card with the calibration that is for it, or with the one that was asked for. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.calibration import here, store
from harness.calibration.record import Calibration, Device, load
from harness.calibration.store import Applied
from harness.predict.speed import cards
from harness.predict.speed.cards import Card
from harness.system import gpus
from strategies.base import BadInput

__all__ = [
    "FILE",
    "NONE",
    "UNCALIBRATED",
    "as_calibrated",
    "find",
    "keep_beside",
    "kept_for",
    "measured_on",
    "of_environment",
    "this_cpu",
    "words",
]

FILE = "calibration.json"
"""Beside a set of results: the calibration of the machine that they are of."""

NONE = "none"
"""In place of a calibration's file: typical figures, whatever is kept."""
UNTRIED = "No step time measured on {} was ever compared with a prediction: its times are untried."
UNCALIBRATED = (
    "Times, context and communication are typical figures; ./run.sh calibrate on such a machine "
    "makes them its own."
)


def find(name: str) -> Card:
    """The card of that name: the table's, or one that was calibrated.

    Raises:
        BadInput: neither knows it; names the nearest.
    """
    try:
        return cards.find(name)
    except BadInput:
        for one in store.every():
            if one.device.kind == "cuda" and one.device.name.lower() == name.strip().lower():
                return cards.of_device(one.device)
        raise


def this_cpu() -> Card:
    """The CPU that this runs on."""
    cpu = here.device("cpu")
    return cards.of_cpu(cpu.name, cpu.cores, cpu.memory_bytes)


def as_calibrated(card: Card, asked: str = "") -> Card:
    """``card`` with its calibration: the one in the file ``asked``, none for ``NONE``, or else the
    best that is kept for it, if there is one.

    Raises:
        BadInput: the file is no calibration, or one of another kind of device.
    """
    if asked == NONE:
        return card
    if asked:
        found = load(Path(asked))
        if (found.device.kind == "cpu") != card.shared:
            raise BadInput(
                f"calibration {asked} is of {found.device.name}; give one of the device that the "
                f"plan is for, or --calibration {NONE}"
            )
        return cards.with_calibration(card, _applied([found]))
    return cards.with_calibration(card, _applied([o for o in store.every() if _is(card, o)]))


def kept_for(device: str) -> Applied | None:
    """The best calibration that is kept for a device, named as a worker names it: a GPU, or cpu."""
    if device == "cpu":
        return as_calibrated(this_cpu()).calibrated
    same = [one for one in store.every() if one.device.name == device]
    return _applied(same)


def keep_beside(folder: Path, device: str) -> None:
    """Leave the calibration of ``device`` beside results that were measured on it, so that their
    report is made of the same wherever it is made. Nothing where there is none."""
    found = kept_for(device)
    if found:
        with contextlib.suppress(OSError):
            found.calibration.write(folder / FILE)


def _is(card: Card, calibration: Calibration) -> bool:
    device = calibration.device
    if card.shared or device.kind == "cpu":
        return card.shared and device.kind == "cpu" and card.name == device.name
    return not card.like and cards.of_device(device).name == card.name


def _applied(calibrations: list[Calibration]) -> Applied | None:
    """The best of them, marked by what is installed here; a driver counts where the card is."""
    present = {gpu.name for gpu in gpus.visible()} if calibrations else set()
    known = any(one.device.name in present for one in calibrations)
    return store.choose(calibrations, driver=here.driver() if known else "", torch=here.torch())


def of_environment(environment: Mapping[str, Any], found: Calibration | None) -> Card | None:
    """The card that a result was measured on, by what its worker recorded, with the calibration
    that lies beside it; None for one that nothing is known of."""
    device = str(environment.get("device") or "")
    if found is None or not measured_on(environment, found.device):
        return cards.named(device, int(environment.get("device_bytes") or 0))
    versions = environment.get("versions") or {}
    known = store.applied(
        found,
        driver=environment.get("driver") or "",
        torch=versions.get("torch") or "",
        cores=environment.get("cores") or 0,
    )
    return cards.with_calibration(cards.of_device(found.device), known)


def measured_on(environment: Mapping[str, Any], device: Device) -> bool:
    """Whether ``device`` is the one of that environment."""
    if device.kind == "cpu":
        same = str(environment.get("cpu") or "") == device.name.rpartition(", ")[0]
        return environment.get("device") == "cpu" and same
    return environment.get("device") == device.name


def words(card: Card) -> str:
    """What its predictions rest on beside the trace, in sentences."""
    if card.calibrated:
        return card.calibrated.words
    if card.like or not card.untried:
        return UNCALIBRATED
    return f"{UNCALIBRATED} {UNTRIED.format(card.name)}"

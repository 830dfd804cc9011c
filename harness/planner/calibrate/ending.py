"""Output of a call: the calibration, its tables, and one archive of the session. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.json_files import build
from harness.planner import overhead, pool
from harness.planner.calibrate.parts import PARTS, Outcome, kept, measured_row
from harness.planner.calibrate.running import Session
from harness.planner.calibrate.table import judged, lines, tables
from harness.planner.calibration import store
from harness.planner.calibration.record import (
    Calibration,
    Ceilings,
    Device,
    MeasuredRow,
    StandingBytes,
)
from harness.prediction import FILE, Prediction, read_predictions
from harness.prediction import kept as kept_prediction
from harness.report.data.grid import Grid
from harness.resolve import run_name
from harness.result import Result, Status, load_all

# ---- calibration ----
# Pure functions.


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
) -> Calibration:
    """Return the calibration of ``device``.

    ``predictions`` are by the key of a spec; ``load`` is the number of cores that other work
    kept busy.
    """
    ceilings, standing = ceilings_of(outcomes), standing_of(outcomes)
    rows = [
        measured_row(result, predictions.get(result.spec.key), device, ceilings, standing)
        for result in results
    ]
    return Calibration(
        device=device,
        measured=datetime.date.today().isoformat(),
        load=load,
        ceilings=ceilings,
        standing=standing,
        rows=rows,
        missing=_missing(outcomes),
    )


def ceilings_of(outcomes: Sequence[Outcome]) -> Ceilings:
    """Return the ceilings that the stations measured."""
    return build(Ceilings, _facts(outcomes, CEILINGS), "ceilings")


def standing_of(outcomes: Sequence[Outcome]) -> StandingBytes:
    """Return the fixed overhead in bytes that the stations measured."""
    return build(StandingBytes, _facts(outcomes, STANDING), "standing")


def _facts(outcomes: Sequence[Outcome], names: Sequence[str]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for outcome in outcomes:
        if outcome.status == "ok":
            merged |= {name: value for name, value in outcome.facts.items() if name in names}
    return merged


def _missing(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Station, or a type or kernel of one -> the reason for its missing numbers."""
    found: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.status != "ok":
            found[outcome.station] = f"{outcome.status}: {outcome.reason}"
        for name, why in (outcome.facts.get("missing") or {}).items():
            found[f"{outcome.station}: {name}"] = str(why)
    return found


# ---- archive ----
# One file of a session's measurements and outcomes, without its caches.


FILE_BYTES = 4 * 2**20
"""Larger files are recordings or compiler output, and are not archived."""
LEFT_OUT = ("compiled", "profile", "nvme", "ranks", "predictions")
"""Folders of a run that are not read later. Predictions are also stored beside the results."""


def pack(folder: Path, target: Path) -> Path:
    """Write ``target``, a gzipped tar of the session in one folder of its name."""
    beside = target.with_name(f".{target.name}")
    with tarfile.open(beside, "w:gz") as tar:
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            hidden = any(part in LEFT_OUT or part.startswith(".") for part in inside.parts)
            plain = path.is_file() and not path.is_symlink() and not hidden
            if plain and path.stat().st_size <= FILE_BYTES:
                tar.add(path, arcname=str(Path(folder.name) / inside))
    beside.replace(target)
    return target


@dataclass(frozen=True, kw_only=True)
class Left:
    """The output of a call. ``kept`` is the file in which predictions find the calibration.

    It is None for a rehearsal, or if nothing was measured.
    """

    calibration: Calibration
    tables: list[Grid]
    page: Path
    archive: Path
    kept: Path | None


def leave(session: Session, outcomes: Sequence[Outcome]) -> Left:
    """Predict the rows that ran, and write all files; ``outcomes`` are this call's."""
    every = _every(session, outcomes)
    results = _results(session)
    predictions = _predicted(session, results)
    load = max((float(outcome.facts.get("load", 0.0)) for outcome in every), default=0.0)
    found = calibration_of(session.device, every, results, predictions, load=load)
    goals = judged(
        dataclasses.replace(found, rows=[*found.rows, *_story(session, found)]), _meter(every)
    )
    made = tables(found, every, goals)
    session.folder.mkdir(parents=True, exist_ok=True)
    found.write(session.folder / "calibration.json")
    page = session.folder / "calibration.md"
    page.write_text(lines(f"Calibration of {found.device.name}", made), encoding="utf-8")
    archive = pack(session.folder, session.folder.parent / f"{session.folder.name}.tar.gz")
    return Left(
        calibration=found, tables=made, page=page, archive=archive, kept=_keep(session, found)
    )


def _every(session: Session, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return each station's outcome: this call's, or an earlier one that is still valid."""
    now = {(outcome.part, outcome.station): outcome for outcome in outcomes}
    found = []
    for part in PARTS:
        for station in session.stations(part):
            outcome = now.get((part, station.name)) or kept(part, station.name, session.folder)
            if outcome is not None and outcome.mark == session.mark(station):
                found.append(outcome)
    return found


def _results(session: Session) -> list[Result]:
    """Return the results of this setting's rows in the order of stations, then the known ones."""
    rows = [station.spec for station in session.stations("memory") if station.spec]
    there = {result.spec: result for result in load_all(session.folder / "memory")[0]}
    return [*(there[spec] for spec in rows if spec in there), *session.known]


def _predicted(session: Session, results: Sequence[Result]) -> dict[str, Prediction]:
    """Return predictions of the rows that ended well: stored ones, and new ones for the rest."""
    out, predictions = session.folder / "memory", {}
    for result in results:
        known = kept_prediction(out / "runs" / run_name(result.spec) / FILE)
        if known is not None:
            predictions[result.spec.key] = known
    missing = [r for r in results if r.status is Status.OK and r.spec.key not in predictions]
    if not missing:
        return predictions
    session.tell(f"{len(missing)} predictions, {pool.default_jobs()} at a time")
    kind = overhead.taken(missing[0].environment)
    rows = [session.resolved_of(result.spec) for result in missing]
    with session.live(f"{len(rows)} predictions", 0.0):
        found = pool.predict_all(rows, out / "predictions", kind=kind)
    for row, prediction in zip(rows, found, strict=True):
        predictions[row.spec.key] = prediction
        with contextlib.suppress(OSError):
            prediction.write(out / "runs" / run_name(row.spec) / FILE)
    return predictions


def _story(session: Session, found: Calibration) -> list[MeasuredRow]:
    """Return the rows of the suites. Only the goals use them."""
    rows = []
    for folder in sorted((session.folder / "story").glob("*")):
        skipped: list[str] = []
        predictions = read_predictions(folder, skipped)
        for line in skipped:
            session.tell(f"left out: {line}")
        rows += [
            measured_row(
                result,
                predictions.get(result.spec.key),
                found.device,
                found.ceilings,
                found.standing,
            )
            for result in load_all(folder)[0]
        ]
    return rows


def _meter(outcomes: Sequence[Outcome]) -> float | None:
    shares = (outcome.facts.get("meter_share") for outcome in outcomes)
    return next((float(share) for share in shares if share is not None), None)


def _keep(session: Session, found: Calibration) -> Path | None:
    """Write the calibration where predictions find it; numbers of a rehearsal are not stored."""
    if session.setting.small or not (found.ceilings.products or found.rows):
        return None
    path = store.file_of(found, store.OWN)
    found.write(path)
    return path

"""What a call leaves: the calibration, its tables, and one archive of the session. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.calibrate.archive import pack
from harness.calibrate.assemble import calibration_of
from harness.calibrate.goals import judged
from harness.calibrate.outcome import Outcome, kept
from harness.calibrate.parts import PARTS
from harness.calibrate.rows import measured_row
from harness.calibrate.session import Session
from harness.calibrate.table import Table, lines, tables
from harness.calibration import store
from harness.calibration.record import Calibration, MeasuredRow
from harness.predict import attention, pool
from harness.predict.prediction import Prediction
from harness.predict.prediction import kept as kept_prediction
from harness.report.figures.predicted import FILE, read_predictions
from harness.resolve import run_name
from harness.result import Result, Status, load_all

__all__ = ["Left", "leave"]


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a call left; ``kept``: where predictions find the calibration, None for a rehearsal or
    where nothing was measured."""

    calibration: Calibration
    tables: list[Table]
    page: Path
    archive: Path
    kept: Path | None


def leave(session: Session, outcomes: Sequence[Outcome]) -> Left:
    """Predict the rows that ran, and write everything. ``outcomes`` are this call's; those of
    earlier calls are read."""
    every = _every(session, outcomes)
    results = _results(session)
    predictions = _predicted(session, results)
    found = calibration_of(session.device, every, results, predictions, load=_load(every))
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
    """Of every station of every part the outcome of this call, or an earlier one that holds."""
    now = {(outcome.part, outcome.station): outcome for outcome in outcomes}
    found = []
    for part in PARTS:
        for station in session.stations(part):
            earlier = kept(part, station.name, session.folder)
            if earlier is not None and earlier.mark != session.mark(station):
                earlier = None
            outcome = now.get((part, station.name)) or earlier
            found += [outcome] if outcome else []
    return found


def _results(session: Session) -> list[Result]:
    """Of the rows of this setting, in order of worth."""
    rows = [station.spec for station in session.stations("memory") if station.spec]
    there = {result.spec: result for result in load_all(session.folder / "memory")[0]}
    return [*(there[spec] for spec in rows if spec in there), *session.known]


def _predicted(session: Session, results: Sequence[Result]) -> dict[str, Prediction]:
    """Of the rows that ended well: those of earlier calls, and the others made now."""
    out, predictions = session.folder / "memory", {}
    for result in results:
        known = kept_prediction(out / "runs" / run_name(result.spec) / FILE)
        if known is not None:
            predictions[result.spec.key] = known
    missing = [r for r in results if r.status is Status.OK and r.spec.key not in predictions]
    if not missing:
        return predictions
    session.tell(f"{len(missing)} predictions, {pool.default_jobs()} at a time")
    kind = attention.taken(missing[0].environment)
    rows = [session.resolved_of(result.spec) for result in missing]
    found = pool.predict_all(rows, out / "predictions", kind=kind)
    for row, prediction in zip(rows, found, strict=True):
        predictions[row.spec.key] = prediction
        with contextlib.suppress(OSError):
            prediction.write(out / "runs" / run_name(row.spec) / FILE)
    return predictions


def _story(session: Session, found: Calibration) -> list[MeasuredRow]:
    """Rows of the suites: they count for goals alone."""
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


def _load(outcomes: Sequence[Outcome]) -> float:
    """Cores that other work kept busy, of the measure that had most."""
    return max((float(outcome.facts.get("load", 0.0)) for outcome in outcomes), default=0.0)


def _meter(outcomes: Sequence[Outcome]) -> float | None:
    shares = (outcome.facts.get("meter_share") for outcome in outcomes)
    return next((float(share) for share in shares if share is not None), None)


def _keep(session: Session, found: Calibration) -> Path | None:
    """Where predictions find it; a rehearsal's numbers are of tiny shapes, and are not kept."""
    if session.setting.small or not (found.ceilings.products or found.rows):
        return None
    path = store.file_of(found, store.OWN)
    found.write(path)
    return path

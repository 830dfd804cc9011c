"""One call of ``calibrate``: its stations, each in its own process, its rows, and its files.
A failed station is an outcome and does not stop the others. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from harness import ROOT
from harness.commands.progress import Progress, Waiting
from harness.json_files import BadFile, build, read_json, write_json
from harness.launch.command import inherited
from harness.launch.sources import digest
from harness.planner import overhead, pool
from harness.planner.calibrate.rows import Setting, measured_rows, specs
from harness.planner.calibration import store
from harness.planner.calibration.record import Calibration, Ceilings, Device, StandingBytes
from harness.prediction import FILE, Prediction
from harness.prediction import kept as kept_prediction
from harness.resolve import resolve, run_name
from harness.result import Result, Status
from harness.suite.file import Suite, SuiteRow
from harness.suite.run import plan, run_suite
from harness.system import process
from harness.system.machine import Machine, busy_now

MINUTES = {
    "cuda": {"products": 1.0, "streams": 0.5, "standing": 0.3, "attention": 1.5, "copies": 0.4,
             "collective": 0.8},
    "cpu": {"products": 0.7, "streams": 0.4, "standing": 0.2, "attention": 0.5, "collective": 0.3},
}  # fmt: skip
"""Device -> station -> expected minutes on an idle machine."""
LATE_SECONDS = 480.0
"""A station or row is ended after so long."""
LOG_BYTES = 4000


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a station: ok or failed.
    ``facts`` are its measurements; ``mark`` is a hash of device, sources and settings."""

    station: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    mark: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Session:
    """One call's folder and options."""

    folder: Path
    machine: Machine
    setting: Setting
    console: Console
    fresh: bool = False

    @functools.cached_property
    def device(self) -> Device:
        """The device to calibrate."""
        return store.device(self.setting.device, self.machine)

    @property
    def stations(self) -> list[str]:
        """The names of the stations, in order."""
        names = MINUTES[self.setting.device]
        return [name for name in names if name != "collective" or self.setting.processes > 1]

    def file(self, station: str) -> Path:
        """Return the file of a station's outcome."""
        return self.folder / "stations" / f"{station}.json"

    @functools.cached_property
    def mark(self) -> str:
        """A hash of everything that decides what a station measures."""
        sources = digest(("planner/calibrate/stations",))
        facts = [dataclasses.asdict(self.device), sources, self.setting.small]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def earlier(self, station: str) -> Outcome | None:
        """Return the outcome of an earlier call that needs no repetition, or None."""
        try:
            found = read_json(self.file(station), Outcome)
        except BadFile:
            return None
        good = found.status == "ok" and found.mark == self.mark and not self.fresh
        return found if good else None

    def tell(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(Text(text), soft_wrap=True)


def run_stations(session: Session) -> list[Outcome]:
    """Return the outcome of every station: of an earlier call, or of a process started now.

    Raises:
        process.Interrupted or KeyboardInterrupt: Ctrl-C; finished outcomes are stored.
    """
    return [_outcome(name, session) for name in session.stations]


def _outcome(name: str, session: Session) -> Outcome:
    earlier = session.earlier(name)
    if earlier is not None:
        session.tell(f"{name}: {earlier.status}  (from an earlier call)")
        return earlier
    began, expected = time.monotonic(), 60 * MINUTES[session.setting.device][name]
    with Waiting(session.console, name, expected):
        try:
            status, reason, facts = "ok", "", _measure(name, session)
        except process.Interrupted:
            raise
        except Exception as error:  # the outcome has the reason; other stations continue
            status, reason, facts = "failed", str(error)[:300] or type(error).__name__, {}
    took = time.monotonic() - began
    found = Outcome(
        station=name, status=status, reason=reason, seconds=took, mark=session.mark, facts=facts
    )
    write_json(session.file(name), dataclasses.asdict(found))
    session.tell(f"{name}: {status}{f': {reason}' if reason else ''}  {took:.0f} s")
    return found


def _measure(name: str, session: Session) -> dict[str, Any]:
    """Run a station's process; return its measurements, with ``load``: cores that others kept busy.

    Raises:
        RuntimeError: it failed, was late, or wrote no numbers.
    """
    out, log = (session.folder / kind / name for kind in ("measured", "logs"))
    for path in (out, log):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    words = [sys.executable, "-m", "harness.planner.calibrate.stations", name, str(out)]
    words += ["--device", session.setting.device, *(["--small"] if session.setting.small else [])]
    busy, own = busy_now(), _children_seconds()
    ended = process.run_child(words, cwd=ROOT, env=inherited(), log=log, timeout=LATE_SECONDS)
    others = (busy_now() - busy) - (_children_seconds() - own)
    if ended.stopped:
        raise RuntimeError(f"{ended.stopped} after {ended.wall_seconds:.0f} s")
    if ended.exit_code != 0:
        text = log.read_bytes()[-LOG_BYTES:].decode("utf-8", "replace") if log.exists() else ""
        lines = (line.strip() for line in reversed(text.splitlines()))
        last = next(filter(None, lines), "it said nothing")
        how = f"exit code {ended.exit_code}" if ended.signal is None else f"signal {ended.signal}"
        raise RuntimeError(f"{how}: {last[:200]}")
    if not out.exists():
        raise RuntimeError("the station wrote no numbers")
    load = max(0.0, others) / max(ended.wall_seconds, 1e-3)
    return {**json.loads(out.read_text(encoding="utf-8")), "load": load}


def _children_seconds() -> float:
    """Return the CPU seconds of children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def run_rows(session: Session) -> list[Result]:
    """Run the rows as one suite, and return their results.

    Raises:
        harness.suite.run.SuiteInterrupted: Ctrl-C; finished rows are stored.
    """
    out = session.folder / "rows"
    planned = plan([resolve(spec) for spec in specs(session.setting)], out, session.machine)
    recipes = tuple(SuiteRow(recipe=row.resolved.spec.recipe) for row in planned)
    suite = Suite(
        path=Path("calibrate"),
        name="calibrate",
        title="Rows by which predictions are calibrated",
        reference=recipes[0].recipe,
        timeout_seconds=LATE_SECONDS,
        device=session.setting.device,
        settings={},
        rows=recipes,
    )
    progress = Progress(session.console)
    return run_suite(
        suite, planned, out, machine=session.machine, progress=progress, fresh=session.fresh
    )


def _predicted(session: Session, results: Sequence[Result]) -> dict[str, Prediction]:
    """Return predictions of the rows that ended well: stored ones, and new ones for the rest."""
    out, predictions = session.folder / "rows", {}
    for result in results:
        known = kept_prediction(out / "runs" / run_name(result.spec) / FILE)
        if known is not None:
            predictions[result.spec.key] = known
    missing = [r for r in results if r.status is Status.OK and r.spec.key not in predictions]
    if not missing:
        return predictions
    kind = overhead.taken(missing[0].environment)
    rows = [resolve(result.spec) for result in missing]
    with Waiting(session.console, f"{len(rows)} predictions, {pool.default_jobs()} at a time"):
        found = pool.predict_all(rows, out / "predictions", kind=kind)
    for row, prediction in zip(rows, found, strict=True):
        predictions[row.spec.key] = prediction
        with contextlib.suppress(OSError):
            prediction.write(out / "runs" / run_name(row.spec) / FILE)
    return predictions


def calibration_of(
    session: Session, outcomes: Sequence[Outcome], results: Sequence[Result]
) -> Calibration:
    """Predict the rows that ran, and return the calibration of the session's device."""
    ceilings, standing = (build_from(outcomes, kind) for kind in (Ceilings, StandingBytes))
    predictions = _predicted(session, results)
    missing: dict[str, str] = {}  # station, or a type or kernel of one -> why it has no numbers
    for one in outcomes:
        missing |= {} if one.status == "ok" else {one.station: f"{one.status}: {one.reason}"}
        lacks = one.facts.get("missing") or {}
        missing |= {f"{one.station}: {name}": str(why) for name, why in lacks.items()}
    return Calibration(
        device=session.device,
        measured=datetime.date.today().isoformat(),
        load=max((float(outcome.facts.get("load", 0.0)) for outcome in outcomes), default=0.0),
        ceilings=ceilings,
        standing=standing,
        rows=measured_rows(results, predictions, session.device, ceilings, standing),
        missing=missing,
    )


def build_from(outcomes: Sequence[Outcome], kind: type) -> Any:
    """Return a ``kind`` (Ceilings, StandingBytes) of what the stations measured."""
    names, merged = {one.name for one in dataclasses.fields(kind)}, {}
    for outcome in outcomes:
        if outcome.status == "ok":
            merged |= {name: value for name, value in outcome.facts.items() if name in names}
    return build(kind, merged, kind.__name__.lower())


def keep(session: Session, found: Calibration) -> Path | None:
    """Write the calibration where predictions find it; numbers of a rehearsal are not stored."""
    if session.setting.small or not (found.ceilings.products or found.rows):
        return None
    path = store.file_of(found, store.OWN)
    found.write(path)
    return path

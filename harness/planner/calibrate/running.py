"""Runs the stations of a part, each in processes of its own. A station that fails is an outcome;
none ends the rest. No torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.launch.command import inherited
from harness.planner.calibrate.parts import Outcome, Station, outcome_file
from harness.planner.calibrate.session import Session, Together
from harness.result import Result, Status
from harness.suite.file import Suite, SuiteRow
from harness.suite.run import Planned, SuiteInterrupted, run_suite
from harness.system import process
from harness.system.machine import busy_now

LOG_BYTES = 4000
PATIENCE, LEAST_SECONDS = 4.0, 240.0
"""A station is ended after so many times what is expected of it, and no sooner than that."""
SUITE_SECONDS = 3600.0
"""The same least of a suite: each of its runs has a deadline of its own."""
LONG = ("suite", "tests", "meter")
"""Kinds of stations that take minutes and say nothing by then: it is told where they write."""
GPU_TESTS = "tests/worker"
METER_BENCH = "tests/bench/meter_cost.py"
WORDS = {Status.UNSUPPORTED: "lacking", Status.REFUSED: "lacking", Status.OK: "ok"}


def run_part(part: str, session: Session) -> list[Outcome]:
    """Every station of ``part``, in order of worth; the outcomes, earlier ones too.

    Raises:
        process.Interrupted, SuiteInterrupted or KeyboardInterrupt: Ctrl-C; what had ended is kept.
    """
    stations = session.stations(part)
    session.tell(f"{part}: {len(stations)} stations")
    checks = [station for station in stations if station.kind == "check"]
    outcomes = [
        _one(station, session, f"[{index}/{len(stations)}]")
        for index, station in enumerate(stations, 1)
        if station.kind != "check"
    ]
    return outcomes + (_checked(checks, session) if checks else [])


def _one(station: Station, session: Session, place: str) -> Outcome:
    """One station's outcome: kept, skipped for lack of time, or measured now."""
    earlier = session.earlier(station)
    if earlier is not None and station.kind != "row":  # a row looks for its own result
        session.tell(f"{place} {station.name}: {earlier.status}  (from an earlier call)")
        return earlier
    lack = "" if earlier else session.budget.lacks(station.minutes)
    began = time.monotonic()
    if lack:
        outcome = _outcome(station, session, "skipped", lack)
    else:
        if station.kind in LONG:
            log = _log(station, session)
            session.tell(
                f"{place} {station.name}: begins, about {station.minutes:.0f} min; see {log}"
            )
        outcome = _measured(station, session)
        seconds = time.monotonic() - began
        outcome = dataclasses.replace(outcome, seconds=seconds)
        outcome.write(session.folder)
    _tell(outcome, session, place)
    return outcome


def _tell(outcome: Outcome, session: Session, place: str) -> None:
    why = f": {outcome.reason}" if outcome.reason else ""
    took = f"  {outcome.seconds:.0f} s" if outcome.seconds >= 0.5 else ""
    session.tell(f"{place} {outcome.station}: {outcome.status}{why}{took}")


def _outcome(
    station: Station, session: Session, status: str, reason: str = "", **facts: Any
) -> Outcome:
    return Outcome(
        station=station.name,
        part=station.part,
        status=status,
        reason=reason,
        mark=session.mark(station),
        facts=facts,
    )


def _measured(station: Station, session: Session) -> Outcome:
    kinds = {"measure": _measure, "row": _row, "suite": _suite, "tests": _tests, "meter": _meter}
    try:
        return kinds[station.kind](station, session)
    except (process.Interrupted, SuiteInterrupted):
        raise
    except Exception as error:  # the rest goes on, and the outcome says why
        return _outcome(station, session, "failed", f"{type(error).__name__}: {error}"[:300])


# ---- one child ----


def _log(station: Station, session: Session) -> Path:
    """What its child says."""
    name = outcome_file(station.part, station.name, Path()).stem
    return session.folder / "logs" / f"{name}.txt"


def _child(words: Sequence[str], station: Station, session: Session) -> tuple[process.Ended, str]:
    """Run a Python of this environment to its end or its deadline; with the end of what it said."""
    log = _log(station, session)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    ended = process.run_child(
        [sys.executable, *words],
        cwd=ROOT,
        env=inherited(),
        log=log,
        timeout=max(_least(station), PATIENCE * 60 * station.minutes),
    )
    text = log.read_bytes()[-LOG_BYTES:].decode("utf-8", errors="replace") if log.exists() else ""
    return ended, text


def _least(station: Station) -> float:
    return SUITE_SECONDS if station.kind == "suite" else LEAST_SECONDS


def _fault(ended: process.Ended, text: str) -> str:
    """Why a child did not end well; empty where it did."""
    if ended.stopped:
        return f"{ended.stopped} after {ended.wall_seconds:.0f} s"
    if ended.exit_code == 0:
        return ""
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
    how = f"exit code {ended.exit_code}" if ended.signal is None else f"signal {ended.signal}"
    return f"{how}: {last.strip()[:200]}"


def _measure(station: Station, session: Session) -> Outcome:
    out = session.folder / "measured" / f"{station.name}.json"
    out.unlink(missing_ok=True)
    words = ["-m", "harness.planner.calibrate.stations", station.name, str(out)]
    words += ["--device", session.setting.device, *(["--small"] if session.setting.small else [])]
    busy, own = busy_now(), _children_seconds()
    ended, text = _child(words, station, session)
    others = (busy_now() - busy) - (_children_seconds() - own)
    why = _fault(ended, text)
    if why or not out.exists():
        return _outcome(station, session, "failed", why or "it left no numbers")
    facts = json.loads(out.read_text(encoding="utf-8"))
    load = max(0.0, others) / max(ended.wall_seconds, 1e-3)
    return _outcome(station, session, "ok", load=load, **facts)


def _children_seconds() -> float:
    """CPU seconds of children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _tests(station: Station, session: Session) -> Outcome:
    """The tests that want a GPU and are not of the catalog."""
    if not (ROOT / GPU_TESTS).exists():
        return _outcome(station, session, "lacking", f"there is no {GPU_TESTS} here")
    words = ["-m", "pytest", "-m", "gpu", "-q", GPU_TESTS]
    ended, text = _child(words, station, session)
    why = _fault(ended, text)
    counted = next((line for line in reversed(text.splitlines()) if " in " in line), "")
    return _outcome(station, session, "failed" if why else "ok", why or counted)


def _meter(station: Station, session: Session) -> Outcome:
    """What measuring costs a step, by the bench that says so."""
    if not (ROOT / METER_BENCH).exists():
        return _outcome(station, session, "lacking", f"there is no {METER_BENCH} here")
    words = [METER_BENCH, "--device", session.setting.device, "--pairs", "3"]
    words += ["--recipe", "single+bf16", "--model", "DiT-B/2", "--global-batch", "32"]
    ended, text = _child(words, station, session)
    share = meter_share(text)
    why = _fault(ended, text) or ("" if share is not None else "it named no cost")
    if why:
        return _outcome(station, session, "failed", why)
    return _outcome(station, session, "ok", meter_share=share)


def meter_share(text: str) -> float | None:
    """The share of a step that measuring costs, of what the bench prints; None where it says it
    not."""
    found = re.search(r"^measured .*\n\s+wall off by ([+-][\d.]+) %", text, re.MULTILINE)
    return float(found[1]) / 100 if found else None


def _suite(station: Station, session: Session) -> Outcome:
    """A suite by the command that a person would type; rows that are finished are kept by it."""
    words = ["-m", "harness", "run", "--suite", station.name, "--device", session.setting.device]
    words += ["--out", str(session.folder / "story" / station.name)]
    for name, value in session.overrides.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    ended, text = _child(words, station, session)
    if ended.exit_code == 1 and not ended.stopped:
        return _outcome(station, session, "partly", "a row did not end well; its report says which")
    why = _fault(ended, text)
    return _outcome(station, session, "failed" if why else "ok", why)


# ---- rows ----


class _Silent:
    """A suite of one row, of which the station itself is told."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: None


def _row(station: Station, session: Session) -> Outcome:
    out = session.folder / "memory"
    row = session.planned(station, out)
    results = run_suite(
        _suite_of([row], session),
        [row],
        out,
        machine=session.machine,
        progress=_Silent(),
        fresh=session.fresh,
        timeout=max(LEAST_SECONDS, PATIENCE * 60 * station.minutes),
    )
    return _ended(station, session, results[0])


def _ended(station: Station, session: Session, result: Result) -> Outcome:
    """A failed row may be run again by the next call; one that the machine lacks will not be."""
    status = WORDS.get(result.status, "failed")
    why = "" if status == "ok" else f"{result.status.value}: {result.reason}"[:300]
    key = result.spec.key
    return _outcome(station, session, status, why, result=result.status.value, spec=key)


def _suite_of(rows: Sequence[Planned], session: Session) -> Suite:
    recipes = tuple(SuiteRow(recipe=row.resolved.spec.recipe) for row in rows)
    return Suite(
        path=Path("calibrate"),
        name="calibrate",
        title="Rows by which predictions are calibrated",
        reference=recipes[0].recipe,
        timeout_seconds=LEAST_SECONDS,
        device=session.setting.device,
        settings={},
        rows=recipes,
    )


# ---- the check: several at a time ----


def _checked(stations: Sequence[Station], session: Session) -> list[Outcome]:
    folder = session.folder / "check"
    rows = [session.planned(station, folder) for station in stations]
    of_folder = {row.folder: station for row, station in zip(rows, stations, strict=True)}
    jobs = session.jobs_at_a_time
    minutes = stations[0].minutes
    outcomes: list[Outcome] = []

    def ended(row: Planned, result: Result | None, why: str) -> None:
        station = of_folder[row.folder]
        if result is None:
            outcome = _outcome(station, session, "skipped", why)
        else:
            outcome = _ended(station, session, result)
            outcome.write(session.folder)
        outcomes.append(outcome)
        _tell(outcome, session, f"[{len(outcomes)}/{len(rows)}]")

    session.tell(f"check: {len(rows)} recipes of the catalog, {jobs} at a time")
    pool = Together(
        machine=session.machine,
        timeout=max(LEAST_SECONDS, PATIENCE * 60 * minutes * jobs),
        lacks=lambda: session.budget.lacks(minutes),
        ended=ended,
        fresh=session.fresh,
    )
    pool.run(rows, jobs)
    return outcomes

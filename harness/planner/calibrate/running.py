"""One call of ``calibrate``: run the stations of a part, each in its own processes.

A failed station is an outcome and does not stop the others. No torch.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from harness import ROOT
from harness.commands.progress import Progress
from harness.launch import launch
from harness.launch.command import inherited
from harness.planner.calibrate.parts import (
    DONE,
    Budget,
    Outcome,
    Setting,
    Station,
    kept,
    mark_of,
    outcome_file,
    stations_of,
)
from harness.planner.calibration import store
from harness.planner.calibration.record import Device
from harness.resolve import Resolved, resolve
from harness.result import Result, Status
from harness.spec import Spec
from harness.suite.file import Suite, SuiteRow
from harness.suite.rows import without_times
from harness.suite.run import Planned, SuiteInterrupted, must_run, plan, run_row, run_suite
from harness.system import process
from harness.system.machine import Machine, busy_now

LOG_BYTES = 4000
PATIENCE, LEAST_SECONDS = 4.0, 240.0
"""A station is ended after this many times its expected time, and not before this many seconds."""
SUITE_SECONDS = 3600.0
"""The same minimum for a suite, because each of its runs has its own deadline."""
LONG = ("suite", "tests", "meter")
"""Kinds of stations that take minutes without output; their log file is printed."""
GPU_TESTS = "tests/worker"
METER_BENCH = "tests/bench/meter_cost.py"
BENCH = ("--pairs", "3", "--model", "DiT-B/2", "--global-batch", "32")
SMALL_BENCH = ("--pairs", "1", "--model", "DiT-T/8", "--global-batch", "8", "--steps", "2")
WORDS = {Status.UNSUPPORTED: "lacking", Status.REFUSED: "lacking", Status.OK: "ok"}


PROCESS_BYTES = 3 * 2**30
"""Host memory of one process of a small model, with its libraries."""
GPU_BYTES = 6 * 2**30
"""GPU memory of the same process, with its context; a run has a process on each GPU."""
MOST = 8


def default_jobs(machine: Machine, gpu_bytes: int) -> int:
    """Return the number of runs at a time, by cores, host memory and GPU memory.

    A run has two processes. ``gpu_bytes`` is 0 if runs use the CPU.
    """
    limits = [MOST, max(2, machine.cores // 2), machine.memory_bytes // (2 * PROCESS_BYTES)]
    if gpu_bytes:
        limits.append(gpu_bytes // GPU_BYTES)
    return max(1, min(limits))


@dataclass
class Session:
    """One call's folder, options and state.

    ``tell`` prints a line that stays. ``live`` shows a line while work goes on: its name, and the
    seconds that it usually takes. ``jobs``: runs of the check at a time (0: as many as fit).
    ``known``: earlier results of this device, which also calibrate predictions.
    """

    folder: Path
    machine: Machine
    setting: Setting
    budget: Budget
    tell: Callable[[str], None]
    live: Callable[[str, float], AbstractContextManager[Any]]
    fresh: bool = False
    jobs: int = 0
    known: Sequence[Result] = ()
    overrides: Mapping[str, object] = field(default_factory=dict)
    resolved: dict[Spec, Resolved] = field(default_factory=dict)

    @property
    def jobs_at_a_time(self) -> int:
        """The runs of the check at a time."""
        on_gpu = self.setting.device == "cuda"
        return self.jobs or default_jobs(self.machine, on_gpu * self.setting.gpu_bytes)

    @functools.cached_property
    def device(self) -> Device:
        """The device to calibrate."""
        return store.device(self.setting.device, self.machine)

    def stations(self, part: str) -> list[Station]:
        """Return the stations of a part on this machine."""
        return stations_of(part, self.setting)

    def mark(self, station: Station) -> str:
        """Return the hash that decides if a station's earlier outcome is valid."""
        return mark_of(station, self.device, self.setting.small)

    def earlier(self, station: Station) -> Outcome | None:
        """Return the outcome of an earlier call that needs no repetition, or None."""
        found = None if self.fresh else kept(station.part, station.name, self.folder)
        good = found is not None and found.status in DONE and found.mark == self.mark(station)
        return found if good else None

    def planned(self, station: Station, folder: Path) -> Planned:
        """Return the run of a row or a check, with all checks that need no process."""
        assert station.spec is not None
        return plan([self.resolved_of(station.spec)], folder, self.machine)[0]

    def resolved_of(self, spec: Spec) -> Resolved:
        """Return ``spec`` resolved, and cache it."""
        if spec not in self.resolved:
            self.resolved[spec] = resolve(spec)
        return self.resolved[spec]


# ---- stations ----


def run_part(part: str, session: Session) -> list[Outcome]:
    """Run every station of ``part``, in order of worth; return the outcomes, with those of earlier
    calls.

    Raises:
        process.Interrupted, SuiteInterrupted or KeyboardInterrupt: Ctrl-C; finished outcomes
            are stored.
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
    """Return one station's outcome: stored, skipped for lack of time, or measured now."""
    earlier = session.earlier(station)
    if earlier is not None and station.kind != "row":  # ``run_suite`` finds a row's result
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
        with session.live(f"{place} {station.name}", 60 * station.minutes):
            outcome = _measured(station, session)
        seconds = time.monotonic() - began
        outcome = replace(outcome, seconds=seconds)
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
    except Exception as error:  # the outcome has the reason; other stations continue
        return _outcome(station, session, "failed", f"{type(error).__name__}: {error}"[:300])


# ---- child process ----


def _log(station: Station, session: Session) -> Path:
    """Return the log file of a station's child process."""
    name = outcome_file(station.part, station.name, Path()).stem
    return session.folder / "logs" / f"{name}.txt"


def _child(words: Sequence[str], station: Station, session: Session) -> tuple[process.Ended, str]:
    """Run Python on ``words`` until it ends or is late; return the end of its output too."""
    log = _log(station, session)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    least = SUITE_SECONDS if station.kind == "suite" else LEAST_SECONDS
    ended = process.run_child(
        [sys.executable, *words],
        cwd=ROOT,
        env=inherited(),
        log=log,
        timeout=max(least, PATIENCE * 60 * station.minutes),
    )
    text = log.read_bytes()[-LOG_BYTES:].decode("utf-8", errors="replace") if log.exists() else ""
    return ended, text


def _fault(ended: process.Ended, text: str) -> str:
    """Return why a child failed; empty if it succeeded."""
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
        return _outcome(station, session, "failed", why or "the station wrote no numbers")
    facts = json.loads(out.read_text(encoding="utf-8"))
    load = max(0.0, others) / max(ended.wall_seconds, 1e-3)
    return _outcome(station, session, "ok", load=load, **facts)


def _children_seconds() -> float:
    """Return the CPU seconds of children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _tests(station: Station, session: Session) -> Outcome:
    """Run the tests that need a GPU and are not about the catalog."""
    if not (ROOT / GPU_TESTS).exists():
        return _outcome(station, session, "lacking", f"there is no {GPU_TESTS} here")
    words = ["-m", "pytest", "-m", "gpu", "-q", GPU_TESTS]
    words += [] if session.setting.small else ["--all"]
    ended, text = _child(words, station, session)
    why = _fault(ended, text)
    counted = next((line for line in reversed(text.splitlines()) if " in " in line), "")
    return _outcome(station, session, "failed" if why else "ok", why or counted)


def _meter(station: Station, session: Session) -> Outcome:
    """Measure the cost of the meter as a share of a step, by its benchmark."""
    if not (ROOT / METER_BENCH).exists():
        return _outcome(station, session, "lacking", f"there is no {METER_BENCH} here")
    words = [METER_BENCH, "--device", session.setting.device, "--recipe", "single+bf16"]
    words += SMALL_BENCH if session.setting.small else BENCH
    ended, text = _child(words, station, session)
    share = meter_share(text)
    why = _fault(ended, text) or ("" if share is not None else "the benchmark printed no cost")
    if why:
        return _outcome(station, session, "failed", why)
    return _outcome(station, session, "ok", meter_share=share)


def meter_share(text: str) -> float | None:
    """Return the meter's share of a step from the benchmark's output; None if it is missing."""
    found = re.search(r"^measured .*\n\s+wall off by ([+-][\d.]+) %", text, re.MULTILINE)
    return float(found[1]) / 100 if found else None


def _suite(station: Station, session: Session) -> Outcome:
    """Run a suite by its public command, which keeps finished rows."""
    words = ["-m", "harness", "run", "--suite", station.name, "--device", session.setting.device]
    words += ["--out", str(session.folder / "story" / station.name)]
    for name, value in session.overrides.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    ended, text = _child(words, station, session)
    if ended.exit_code == 1 and not ended.stopped:
        return _outcome(station, session, "partly", "a row failed; its report names it")
    why = _fault(ended, text)
    return _outcome(station, session, "failed" if why else "ok", why)


# ---- rows ----


SILENT = Progress(Console(quiet=True, force_terminal=False))
"""The station prints its own line."""


def _row(station: Station, session: Session) -> Outcome:
    out = session.folder / "memory"
    row = session.planned(station, out)
    results = run_suite(
        _suite_of([row], session),
        [row],
        out,
        machine=session.machine,
        progress=SILENT,
        fresh=session.fresh,
        timeout=max(LEAST_SECONDS, PATIENCE * 60 * station.minutes),
    )
    return _ended(station, session, results[0])


def _ended(station: Station, session: Session, result: Result) -> Outcome:
    """Return the outcome of a row. The next call repeats a failed row."""
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


# ---- check ----
# Several rows at a time: only the outcome of each counts, not its time.


def _checked(stations: Sequence[Station], session: Session) -> list[Outcome]:
    jobs, minutes = session.jobs_at_a_time, stations[0].minutes
    rows = [session.planned(station, session.folder / "check") for station in stations]
    session.tell(f"check: {len(rows)} recipes of the catalog, {jobs} at a time")
    over, outcomes = threading.Event(), []
    check = functools.partial(
        _check, session=session, over=over, limit=max(LEAST_SECONDS, PATIENCE * 60 * minutes * jobs)
    )
    with (
        session.live(f"check, {jobs} at a time", 60 * minutes * len(rows) / jobs),
        ThreadPoolExecutor(jobs) as pool,
    ):
        running = [pool.submit(check, *pair) for pair in zip(stations, rows, strict=True)]
        try:
            for ended in as_completed(running):
                outcomes.append(ended.result())
                _tell(outcomes[-1], session, f"[{len(outcomes)}/{len(rows)}]")
        except BaseException:
            over.set()
            pool.shutdown(cancel_futures=True)
            raise
    return outcomes


def _start(session: Session, stop: Callable[[], str | None]) -> Callable[..., Result]:
    """Return ``launch.run`` for one of several runs on one device, with its share of the cores.

    Times and the bytes that the device counts are its neighbors' too, and are left out.
    """
    jobs = session.jobs_at_a_time
    if jobs == 1:
        return functools.partial(launch.run, stop=stop)
    added = {"OMP_NUM_THREADS": str(max(1, session.machine.cores // jobs))}

    def start(resolved: Resolved, folder: Path, **options: Any) -> Result:
        result = launch.run(resolved, folder, stop=stop, added=added, **options)
        for rank in result.ranks if result.meter == "cuda" else ():
            rank.phases = {k: replace(peak, process=None) for k, peak in rank.phases.items()}
        return without_times(result, jobs)

    return start


def _check(
    station: Station, row: Planned, *, session: Session, over: threading.Event, limit: float
) -> Outcome:
    """Return the outcome of a row: an earlier one, skipped for lack of time, or of a new run."""
    machine, fresh = session.machine, session.fresh
    stop = lambda: "interrupted" if over.is_set() else None  # noqa: E731
    try:
        lack = session.budget.lacks(station.minutes) if must_run(row, machine, fresh) else ""
        if lack:
            return _outcome(station, session, "skipped", lack)
        ran = run_row(row, machine, SILENT, fresh, limit, _start(session, stop))
        outcome = _ended(station, session, ran)
    except Exception as error:  # for example a full disk; other rows continue
        outcome = _outcome(station, session, "failed", f"{type(error).__name__}: {error}"[:300])
    if not over.is_set():
        outcome.write(session.folder)
    return outcome

"""The ``calibrate`` command: measure the rates of a machine, and rows to fit predictions to.
Each station measures in its own process (``stations``, which alone imports torch), then one suite
runs the rows. A failed station is an outcome and does not stop the others; the same command resumes
from both."""

from __future__ import annotations

import argparse
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

from harness import RESULTS, ROOT, RUN
from harness.commands.console import FAILED, INTERRUPTED, OK, examined, make_console, short, slug
from harness.commands.options import add_force
from harness.commands.progress import Progress, Waiting
from harness.json_files import BadFile, build, read_json, write_json
from harness.launch.command import inherited
from harness.launch.sources import digest
from harness.planner.calibration import store
from harness.planner.calibration.record import (
    Calibration,
    Ceilings,
    Device,
    MeasuredRow,
    StandingBytes,
)
from harness.planner.calibration.store import Applied
from harness.planner.hooks import predict_measured
from harness.planner.speed.rates import of_device, rates
from harness.planner.speed.roofline import compiles, in_tf32, issues, parts_of
from harness.prediction import Prediction, read_predictions
from harness.report.figures import derive
from harness.resolve import resolve
from harness.result import Result, Status
from harness.spec import DEVICES, Spec, SpecError
from harness.suite import matrix
from harness.suite.file import Suite, SuiteRow
from harness.suite.run import SuiteInterrupted, check_out, plan, run_suite
from harness.system import process
from harness.system.gpus import has_driver
from harness.system.machine import Machine, busy_now, recall
from harness.system.requirements import lacks_sight
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


def specs(device: str, gpus: int = 0, gpu_bytes: int = 0, *, small: bool = False) -> list[Spec]:
    """Return the rows that a machine can run. ``gpu_bytes``: of its smallest GPU.
    On one GPU replicas equal plain training, and shards are whole; an offload is still useful."""
    on_gpu = device == "cuda"
    usual: dict[str, Any] = {
        "device": device,
        "model": SMALL_MODEL if small else "DiT-XL/2" if on_gpu else "DiT-S/4",
        "data": "synthetic",
        "steps": 1 if small else 10 if on_gpu else 5,
        "warmup": 1 if small else 3 if on_gpu else 2,
    }
    batch, processes = CPU_BATCH, gpus if on_gpu else CPU_PROCESSES
    if on_gpu and not small:  # what fits in plain training
        batch = matrix.fitting_batch(usual, gpu_bytes, 1)
    wanted = [(text, 1, 1) for text in HOST_BOUND] if on_gpu else []
    for text in RECIPES[device]:
        alone = parse(text).alone(device)
        if alone or processes > 1 or "offload" in text:
            wanted.append((text, batch, 1 if alone else processes))
    rows = [
        Spec(recipe=parse(text).text, global_batch=each * many, processes=many, **usual)
        for text, each, many in wanted
    ]
    return list(dict.fromkeys(rows))


LATE_SECONDS = 480.0
"""A station or row is ended after so long."""
LOG_BYTES = 4000


@dataclass(frozen=True)
class Outcome:
    """The end of a station: ok or failed.
    ``facts`` are its measurements; ``mark`` is a hash of device, sources and settings."""

    station: str
    status: str
    reason: str = ""
    mark: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Session:
    """One call's folder and options. ``kind``: cuda or cpu. ``small``: a rehearsal with tiny models
    and shapes."""

    folder: Path
    machine: Machine
    kind: str
    console: Console
    small: bool = False
    fresh: bool = False

    @functools.cached_property
    def device(self) -> Device:
        """The device to calibrate."""
        return store.device(self.kind, self.machine)

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return len(self.machine.gpus) or int(self.kind == "cuda")

    @property
    def stations(self) -> list[str]:
        """The names of the stations, in order."""
        found = ["products", "streams", "standing", "attention"]
        found += ["copies"] if self.kind == "cuda" else []
        return [*found, *(["collective"] if self.kind == "cpu" or self.gpus > 1 else [])]

    def file(self, station: str) -> Path:
        """Return the file of a station's outcome."""
        return self.folder / "stations" / f"{station}.json"

    @functools.cached_property
    def mark(self) -> str:
        """A hash of everything that decides what a station measures."""
        sources = digest(("planner/calibrate",))
        facts = [dataclasses.asdict(self.device), sources, self.small]
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
    outcomes = []
    for name in session.stations:
        found, began = session.earlier(name), time.monotonic()
        if found is not None:
            session.tell(f"{name}: {found.status}  (from an earlier call)")
            outcomes.append(found)
            continue
        with Waiting(session.console, name):
            try:
                status, reason, facts = "ok", "", _measure(name, session)
            except process.Interrupted:
                raise
            except Exception as error:  # the outcome has the reason; other stations continue
                status, reason, facts = "failed", str(error)[:300] or type(error).__name__, {}
        took = time.monotonic() - began
        found = Outcome(name, status, reason, session.mark, facts)
        write_json(session.file(name), dataclasses.asdict(found))
        session.tell(f"{name}: {status}{f': {reason}' if reason else ''}  {took:.0f} s")
        outcomes.append(found)
    return outcomes


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
    words += ["--device", session.kind, *(["--small"] if session.small else [])]
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
    out, memory = session.folder / "rows", session.machine.smallest_gpu_bytes or 80 * 2**30
    found = specs(session.kind, session.gpus, memory, small=session.small)
    planned = plan([resolve(spec) for spec in found], out, session.machine)
    recipes = tuple(SuiteRow(recipe=row.resolved.spec.recipe) for row in planned)
    suite = Suite(
        path=Path("calibrate"),
        name="calibrate",
        title="Rows by which predictions are calibrated",
        reference=recipes[0].recipe,
        timeout_seconds=LATE_SECONDS,
        device=session.kind,
        settings={},
        rows=recipes,
    )
    progress = Progress(session.console)
    return run_suite(
        suite, planned, out, machine=session.machine, progress=progress, fresh=session.fresh
    )


def measured_row(result: Result, prediction: Prediction | None, alone: Calibration) -> MeasuredRow:
    """Return a result with its prediction, timed by the ceilings of ``alone`` and no fit."""
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
    row = dataclasses.replace(row, step_seconds=derive.quantile(derive.step_seconds(result), 0.5))
    if prediction is None or prediction.method == "none":
        why = prediction.reason if prediction else "it was not predicted"
        return dataclasses.replace(row, reason=f"not predicted: {why}")
    if not prediction.work:
        return row
    card = dataclasses.replace(of_device(alone.device), calibrated=Applied(calibration=alone))
    processes, work = spec.processes, prediction.work
    parts = parts_of(work, rates(card, processes), processes, in_tf32(spec.recipe))
    count = 0 if card.shared else round(issues(work, compiles(spec.recipe)))
    return dataclasses.replace(row, **parts, operations=count)


def calibration_of(
    session: Session, outcomes: Sequence[Outcome], results: Sequence[Result]
) -> Calibration:
    """Predict the rows that ran, and return the calibration of the session's device."""
    ceilings, standing = (build_from(outcomes, kind) for kind in (Ceilings, StandingBytes))
    rows = [resolve(result.spec) for result in results]
    if not predict_measured(results, rows, session.folder / "rows", session.console):
        raise KeyboardInterrupt
    predictions = read_predictions(session.folder / "rows", [])
    alone = Calibration(device=session.device, measured="", ceilings=ceilings, standing=standing)
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
        rows=[measured_row(one, predictions.get(one.spec.key), alone) for one in results],
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
    if session.small or not (found.ceilings.products or found.rows):
        return None
    path = store.file_of(found, store.OWN)
    found.write(path)
    return path


WIDE = 132
OPS = {"cpu_adam", "async_io", "shm_comm"}
FILES = ("calibration.json", "stations", "logs", "measured", "rows")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``calibrate``."""
    add = parser.add_argument
    add_force(parser)
    text = "rehearse with tiny models and shapes; the numbers are not kept"
    add("--small", action="store_true", help=text)
    add("--device", choices=DEVICES, help="cpu or cuda (default: cuda if there)")
    add("--out", type=Path, metavar="DIR", help="folder (default: results/calibrate/DEVICE)")
    add("--fresh", action="store_true", help="repeat finished stations too (default: keep them)")


def calibrate(options: argparse.Namespace) -> int:
    """Measure stations and rows, and store the calibration; return the exit code."""
    console = make_console(WIDE)
    if has_driver() and not recall(ROOT).gpus:
        examined(console, ROOT, set())  # for a GPU that nvidia-smi does not show (WSL2)
    there = recall(ROOT)
    on_gpu = (options.device or there.device) == "cuda" and there.gpus
    name = slug((there.gpus[0].name if on_gpu else store.processor()).lower())
    usual = RESULTS / "calibrate" / (name + "-small" * options.small)
    folder = options.out.absolute() if options.out else usual
    _sighted(options.device or recall(folder).device, recall(folder))
    check_out(folder, FILES, force=options.force)
    machine = examined(console, folder, OPS)
    device = options.device or machine.device
    _sighted(device, machine)
    session = Session(folder, machine, device, console, options.small, options.fresh)
    try:
        outcomes, results = run_stations(session), run_rows(session)
    except (process.Interrupted, SuiteInterrupted, KeyboardInterrupt):
        session.tell("interrupted; finished stations are kept, and the same command resumes")
        return INTERRUPTED
    found = calibration_of(session, outcomes, results)
    found.write(session.folder / "calibration.json")
    if saved := keep(session, found):
        words = store.applied(found, torch=store.torch()).words
        session.tell(f"{words} Predictions use it from now on: {short(saved)}")
    else:
        session.tell("Predictions do not use it: it was a rehearsal, or nothing was measured.")
    session.tell(f"{RUN} report {short(session.folder / 'rows')} compares memory and times")
    able = (Status.OK, Status.UNSUPPORTED, Status.REFUSED)
    good = all(r.status in able for r in results) and all(o.status == "ok" for o in outcomes)
    return OK if good else FAILED


def _sighted(device: str, machine: Machine) -> None:
    """Refuse a missing GPU; with a driver, only after torch has looked for it."""
    asked = machine.probe is not None or not has_driver()
    if device == "cuda" and not machine.gpus and asked:
        raise SpecError("device is cuda, but torch sees no GPU here; use --device cpu")
    if device == "cuda" and (lack := lacks_sight(machine)):
        raise SpecError(str(lack))

"""``./run.sh calibrate``: measure what predictions assume of this machine, and keep it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from harness import ROOT
from harness.calibrate.ending import Left, leave
from harness.calibrate.outcome import Outcome
from harness.calibrate.parts import PARTS, Setting
from harness.calibrate.running import run_part
from harness.calibrate.session import Session, clock
from harness.calibrate.station import Planned, schedule
from harness.calibrate.table import Table
from harness.calibration import here, store
from harness.calibration.record import Calibration, public
from harness.commands.console import FAILED, INTERRUPTED, OK, examined, make_console, short, slug
from harness.commands.options import check_file
from harness.commands.planning.calibrate_against import against
from harness.predict.speed.calibrated import measured_on
from harness.report.data.grid import Grid, text_grid
from harness.report.rendering.narrow import print_grid
from harness.result import Result, Status, load_all
from harness.spec import DEVICES, SpecError
from harness.suite.run import SuiteInterrupted, check_out
from harness.system import process
from harness.system.gpus import has_driver
from harness.system.machine import Machine, recall
from harness.system.requirements import lacks_sight

__all__ = ["add_arguments", "calibrate"]

WIDE = 132
OPS = {"cpu_adam", "async_io", "shm_comm"}
USUAL = ("memory",)
SMALL_STEPS = {"model": "DiT-T/8", "steps": 1, "warmup": 1, "noise_floor": 1}
SHARED = "others"
"""Whose a shared calibration is, to its reader."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``calibrate``."""
    add = parser.add_argument
    told = "what to do: all of the catalog, what predictions assume, or the first suites " \
        "(default: memory; may be given again)"  # fmt: skip
    add("--part", choices=PARTS, action="append", help=told)
    told = "stop beginning stations that would not fit (default: no limit)"
    add("--minutes", type=minutes, metavar="M", help=told)
    told = "write it for others to use (default: not written)"
    add("--share", type=Path, metavar="FILE", help=told)
    told = "rows that were measured earlier on this machine (default: some are run)"
    add("--rows", type=Path, metavar="DIR", help=told)
    told = "hold planned times to the results in DIR, with and without it (default: calibrate)"
    add("--against", type=Path, metavar="DIR", help=told)
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="what --against compared as JSON (default: not written)",
    )
    add("--dry-run", action="store_true", help="say stations, order and minutes; start nothing")
    told = "a rehearsal: tiny models and shapes, whose numbers are not kept"
    add("--small", action="store_true", help=told)
    add("--device", choices=DEVICES, help="cpu or cuda (default: cuda if there)")
    add("--model", default="", help="of the rows (default: DiT-XL/2, on a CPU DiT-S/4)")
    add("--steps", type=int, default=0, metavar="N", help="timed steps of a row (default: usual)")
    add("--jobs", type=int, default=0, metavar="N", help="checks at a time (default: what fits)")
    add("--out", type=Path, metavar="DIR", help="folder (default: results/calibrate/DEVICE)")
    add("--fresh", action="store_true", help="repeat finished stations too (default: keep them)")


def minutes(text: str) -> float:
    """A number of minutes above 0, for argparse."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes above 0")
    return value


def calibrate(options: argparse.Namespace) -> int:
    """Measure, or only say what would be; the exit code."""
    console = make_console(WIDE)
    _check(options)
    if options.against:
        return against(options, console)
    if has_driver() and not options.dry_run and not recall(ROOT).gpus:
        examined(console, ROOT, set())  # what nvidia-smi does not show (WSL2) names the folder too
    folder = _folder(options)
    if options.dry_run:
        return _dry_run(_session(options, folder, recall(folder), console), options, console)
    if options.share and not options.part:
        kept = store.choose(_own(options, recall(folder)), torch=here.torch())
        if kept is not None:
            return _share(kept.calibration, options.share, console)
    _sighted(options.device or recall(folder).device, recall(folder))
    check_out(folder)
    session = _session(options, folder, examined(console, folder, OPS), console)
    outcomes = _run(session, options.part or USUAL)
    if outcomes is None:
        return INTERRUPTED
    left = leave(session, outcomes)
    _show(left, console)
    if options.share:
        _share(left.calibration, options.share, console)
    return _code(outcomes)


def _check(options: argparse.Namespace) -> None:
    for name in ("steps", "jobs"):
        if getattr(options, name) < 0:
            raise SpecError(f"{name} is {getattr(options, name)}; give --{name} at least 1")
    for name in ("share", "json"):
        if getattr(options, name):
            check_file(getattr(options, name), name)
    if options.json and not options.against:
        raise SpecError("--json is of what --against compared; give --against DIR")


def _folder(options: argparse.Namespace) -> Path:
    if options.out:
        return options.out.absolute()
    parent = ROOT / "results" / "calibrate"
    machine = recall(ROOT)
    device = options.device or machine.device
    name = machine.device_names[0] if device == "cuda" and machine.gpus else here.processor()
    return parent / (slug(name.lower()) + ("-small" if options.small else ""))


def _session(
    options: argparse.Namespace, folder: Path, machine: Machine, console: Console
) -> Session:
    device = options.device or machine.device
    if not options.dry_run:
        _sighted(device, machine)
    setting = Setting(
        device=device,
        gpus=len(machine.gpus) or int(device == "cuda"),
        gpu_bytes=machine.smallest_gpu_bytes or 80 * 2**30,
        small=options.small,
        model=options.model,
        steps=options.steps,
        rows_known=options.rows is not None,
    )
    return Session(
        folder=folder,
        machine=machine,
        setting=setting,
        budget=clock(options.minutes),
        tell=lambda text: console.print(Text(text), soft_wrap=True),
        fresh=options.fresh,
        jobs=options.jobs,
        known=_known(options, device, machine),
        overrides=_overrides(options),
    )


def _known(options: argparse.Namespace, device: str, machine: Machine) -> list[Result]:
    """The results in ``--rows`` that are of this device and ended well, none twice."""
    if options.rows is None:
        return []
    own = here.device(device, machine)
    found = [
        result
        for result in load_all(options.rows)[0]
        if result.status is Status.OK
        and not result.spec.repeat
        and measured_on(result.environment, own)
    ]
    if not found:
        raise SpecError(f"{options.rows}: no results of {own.name} in it; give another --rows DIR")
    return found


def _sighted(device: str, machine: Machine) -> None:
    """Refuse a GPU that is not there; one with a driver may be seen once torch was asked."""
    asked = machine.probe is not None or not has_driver()
    if device == "cuda" and not machine.gpus and asked:
        raise SpecError("device is cuda, and no GPU is to be seen here; use --device cpu")
    lack = lacks_sight(machine) if device == "cuda" else None
    if lack:
        raise SpecError(f"{lack.reason}; {lack.way_out}")


def _overrides(options: argparse.Namespace) -> dict[str, object]:
    """What the suites of the story are given."""
    given = dict(SMALL_STEPS) if options.small else {}
    given |= {"model": options.model} if options.model else {}
    return given | ({"steps": options.steps} if options.steps else {})


def _run(session: Session, parts: Sequence[str]) -> list[Outcome] | None:
    """The outcomes of the parts in their own order; None where Ctrl-C ended them."""
    outcomes: list[Outcome] = []
    try:
        for part in (part for part in PARTS if part in parts):
            outcomes += run_part(part, session)
    except (process.Interrupted, SuiteInterrupted, KeyboardInterrupt):
        session.tell("interrupted; what has ended is kept, and the same command goes on")
        return None
    return outcomes


def _code(outcomes: Sequence[Outcome]) -> int:
    return FAILED if any(o.status in ("failed", "partly") for o in outcomes) else OK


# ---- words ----


def _dry_run(session: Session, options: argparse.Namespace, console: Console) -> int:
    jobs = session.jobs_at_a_time
    parts = [part for part in PARTS if part in (options.part or USUAL)]
    stations = [station for part in parts for station in session.stations(part)]
    done = {station.key for station in stations if session.earlier(station)}
    planned = schedule(stations, options.minutes, done, jobs)
    heads = {"#": "count", "Station": "text", "Minutes": "ratio", "Then": "text", "Why": "text"}
    lines = [
        [str(index), one.station.key, f"{one.station.minutes:.1f}", one.action, one.reason]
        for index, one in enumerate(planned, 1)
    ]
    print_grid(text_grid("stations", "", heads, lines), console, least_worth=())
    console.print(_sum(planned, jobs), highlight=False)
    return OK


def _sum(planned: Sequence[Planned], jobs: int) -> str:
    run = [one.station for one in planned if one.action == "run"]
    spent = sum(s.minutes / (jobs if s.kind == "check" else 1) for s in run)
    skipped = sum(one.action == "skip" for one in planned)
    words = f"{len(run)} stations to run, about {spent:.0f} minutes on a free machine"
    words += f"; checks {jobs} at a time" if any(s.kind == "check" for s in run) else ""
    return words + (f"; {skipped} do not fit and are skipped" if skipped else "")


def _show(left: Left, console: Console) -> None:
    for table in left.tables:
        print_table(table, console)
    kept = store.applied(left.calibration, torch=here.torch())
    if left.kept:
        console.print(Text(f"{kept.words} Predictions use it from now on: {short(left.kept)}"))
    else:
        console.print("Nothing is kept for predictions: a rehearsal, or nothing was measured.")
    for path in (left.page, left.archive):
        console.print(Text(str(short(path))), soft_wrap=True)


def print_table(table: Table, console: Console) -> None:
    """One table and its note."""
    console.print(f"[italic]{escape(table.title)}[/italic]", highlight=False)
    # A column of more than a number and its unit may break between words.
    short = [
        max((len(c.split()) for c in cells), default=0) <= 2
        for cells in zip(*table.rows, strict=True)
    ]
    kinds = ["count" if index and short[index] else "text" for index in range(len(table.heads))]
    lines = [list(row) for row in table.rows]
    marks = [() for _ in lines]
    heads = list(table.heads)
    grid = Grid(key="calibration", title="", heads=heads, kinds=kinds, lines=lines, marks=marks)
    print_grid(grid, console, least_worth=())
    if table.note:
        console.print(escape(table.note), highlight=False)


def _own(options: argparse.Namespace, machine: Machine) -> list[Calibration]:
    """What is kept of this machine's device."""
    name = here.device(options.device or machine.device, machine).name
    return [one for one in store.every(store.OWN) if one.device.name == name]


def _share(calibration: Calibration, path: Path, console: Console) -> int:
    """A file that others can use: put it into their results/calibrations, or name it to plan."""
    public(calibration, SHARED).write(path)
    told = f"./run.sh plan --calibration {path.name} uses it, as does one in {short(store.OWN)}"
    console.print(Text(f"{short(path)}: {told}"), soft_wrap=True)
    return OK

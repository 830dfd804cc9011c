"""The ``calibrate`` command: measure and store the rates and overheads that predictions use."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from harness import RESULTS, ROOT, RUN
from harness.commands.console import FAILED, INTERRUPTED, OK, examined, make_console, short, slug
from harness.commands.options import add_force
from harness.planner.calibrate.rows import Setting
from harness.planner.calibrate.running import (
    Session,
    calibration_of,
    keep,
    run_rows,
    run_stations,
)
from harness.planner.calibrate.table import table
from harness.planner.calibration import store
from harness.planner.calibration.record import Calibration
from harness.report.rendering.pages import table_lines
from harness.report.rendering.table import print_grid
from harness.result import Status
from harness.spec import DEVICES, SpecError
from harness.suite.run import SuiteInterrupted, check_out
from harness.system import process
from harness.system.gpus import has_driver
from harness.system.machine import Machine, recall
from harness.system.requirements import lacks_sight

WIDE = 132
OPS = {"cpu_adam", "async_io", "shm_comm"}
FILES = ("calibration.json", "calibration.md", "stations", "logs", "measured", "rows")


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
    folder = _folder(options)
    _sighted(options.device or recall(folder).device, recall(folder))
    check_out(folder, FILES, force=options.force)
    return _calibrated(_session(options, folder, examined(console, folder, OPS), console))


def _calibrated(session: Session) -> int:
    """Run stations and rows, and write and show the calibration; return the exit code."""
    try:
        outcomes, results = run_stations(session), run_rows(session)
    except (process.Interrupted, SuiteInterrupted, KeyboardInterrupt):
        session.tell("interrupted; finished stations are kept, and the same command resumes")
        return INTERRUPTED
    found = calibration_of(session, outcomes, results)
    found.write(session.folder / "calibration.json")
    _show(found, keep(session, found), session)
    able = (Status.OK, Status.UNSUPPORTED, Status.REFUSED)
    good = all(r.status in able for r in results) and all(o.status == "ok" for o in outcomes)
    return OK if good else FAILED


def _folder(options: argparse.Namespace) -> Path:
    if options.out:
        return options.out.absolute()
    parent = RESULTS / "calibrate"
    machine = recall(ROOT)
    device = options.device or machine.device
    name = machine.device_names[0] if device == "cuda" and machine.gpus else store.processor()
    return parent / (slug(name.lower()) + ("-small" if options.small else ""))


def _session(
    options: argparse.Namespace, folder: Path, machine: Machine, console: Console
) -> Session:
    device = options.device or machine.device
    _sighted(device, machine)
    setting = Setting(
        device=device,
        gpus=len(machine.gpus) or int(device == "cuda"),
        gpu_bytes=machine.smallest_gpu_bytes or 80 * 2**30,
        small=options.small,
    )
    return Session(
        folder=folder,
        machine=machine,
        setting=setting,
        console=console,
        fresh=options.fresh,
    )


def _sighted(device: str, machine: Machine) -> None:
    """Refuse a missing GPU; with a driver, only after torch has looked for it."""
    asked = machine.probe is not None or not has_driver()
    if device == "cuda" and not machine.gpus and asked:
        raise SpecError("device is cuda, but torch sees no GPU here; use --device cpu")
    lack = lacks_sight(machine) if device == "cuda" else None
    if lack:
        raise SpecError(str(lack))


# ---- output ----


def _show(found: Calibration, kept: Path | None, session: Session) -> None:
    """Print the table and write it as a page; say whether predictions use the calibration."""
    grid, page = table(found), session.folder / "calibration.md"
    page.write_text(f"# {grid.title}\n\n{table_lines(grid)}\n", encoding="utf-8")
    print_grid(grid, session.console, least_worth=())
    if kept:
        words = store.applied(found, torch=store.torch()).words
        session.tell(f"{words} Predictions use it from now on: {short(kept)}")
    else:
        session.tell("Predictions do not use it: it was a rehearsal, or nothing was measured.")
    session.tell(f"{RUN} report {short(session.folder / 'rows')} compares memory and times")
    session.tell(str(short(page)))

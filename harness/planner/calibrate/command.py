"""The ``calibrate`` command: measure and store the rates and overheads that predictions use."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import RESULTS, ROOT, RUN
from harness.commands.console import FAILED, INTERRUPTED, OK, examined, make_console, short, slug
from harness.commands.options import add_force
from harness.planner.calibrate.running import (
    Session,
    Setting,
    calibration_of,
    keep,
    run_rows,
    run_stations,
)
from harness.planner.calibration import store
from harness.result import Status
from harness.spec import DEVICES, SpecError
from harness.suite.run import SuiteInterrupted, check_out
from harness.system import process
from harness.system.gpus import has_driver
from harness.system.machine import Machine, recall
from harness.system.requirements import lacks_sight

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
    name = slug((there.device_names[0] if on_gpu else store.processor()).lower())
    usual = RESULTS / "calibrate" / (name + "-small" * options.small)
    folder = options.out.absolute() if options.out else usual
    _sighted(options.device or recall(folder).device, recall(folder))
    check_out(folder, FILES, force=options.force)
    machine = examined(console, folder, OPS)
    device = options.device or machine.device
    _sighted(device, machine)
    setting = Setting(
        device=device,
        gpus=len(machine.gpus) or int(device == "cuda"),
        gpu_bytes=machine.smallest_gpu_bytes or 80 * 2**30,
        small=options.small,
    )
    session = Session(folder, machine, setting, console, options.fresh)
    try:
        outcomes, results = run_stations(session), run_rows(session)
    except (process.Interrupted, SuiteInterrupted, KeyboardInterrupt):
        session.tell("interrupted; finished stations are kept, and the same command resumes")
        return INTERRUPTED
    found = calibration_of(session, outcomes, results)
    found.write(session.folder / "calibration.json")
    if kept := keep(session, found):
        words = store.applied(found, torch=store.torch()).words
        session.tell(f"{words} Predictions use it from now on: {short(kept)}")
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

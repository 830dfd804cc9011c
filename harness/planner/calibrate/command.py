"""The ``calibrate`` command: measure and store the rates and overheads that predictions use."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from harness import RESULTS, ROOT, RUN
from harness.commands.console import FAILED, INTERRUPTED, OK, examined, make_console, short, slug
from harness.commands.options import add_force, check_file
from harness.planner.calibrate.rows import Setting, specs
from harness.planner.calibrate.running import (
    MINUTES,
    ROW_MINUTES,
    Session,
    calibration_of,
    keep,
    run_rows,
    run_stations,
)
from harness.planner.calibrate.table import table
from harness.planner.calibration import store
from harness.planner.calibration.record import Calibration, public
from harness.planner.speed.rates import measured_on
from harness.report.data.grid import text_grid
from harness.report.rendering.pages import table_lines
from harness.report.rendering.table import print_grid
from harness.result import Result, Status, load_all
from harness.spec import DEVICES, SpecError
from harness.suite.run import SuiteInterrupted, check_out
from harness.system import process
from harness.system.gpus import has_driver
from harness.system.machine import Machine, recall
from harness.system.requirements import lacks_sight

WIDE = 132
OPS = {"cpu_adam", "async_io", "shm_comm"}
SHARED = "others"
"""Owner that a shared calibration names to its reader."""
FILES = ("calibration.json", "calibration.md", "stations", "logs", "measured", "rows")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``calibrate``."""
    add = parser.add_argument
    text = "write the calibration to a file for other users (default: not written)"
    add("--share", type=Path, metavar="FILE", help=text)
    text = "use the results in DIR, which this machine measured (default: run some rows)"
    add("--rows", type=Path, metavar="DIR", help=text)
    add_force(parser)
    add("--dry-run", action="store_true", help="print stations, rows and minutes; start nothing")
    text = "rehearse with tiny models and shapes; the numbers are not kept"
    add("--small", action="store_true", help=text)
    add("--device", choices=DEVICES, help="cpu or cuda (default: cuda if there)")
    add("--model", default="", help="model of the rows (default: DiT-XL/2, on a CPU DiT-S/4)")
    text = "timed steps of a row (default: 10, on a CPU 5)"
    add("--steps", type=int, default=0, metavar="N", help=text)
    add("--out", type=Path, metavar="DIR", help="folder (default: results/calibrate/DEVICE)")
    add("--fresh", action="store_true", help="repeat finished stations too (default: keep them)")


def calibrate(options: argparse.Namespace) -> int:
    """Measure, or with ``--dry-run`` list stations and rows; return the exit code."""
    console = make_console(WIDE)
    if options.steps < 0:
        raise SpecError(f"steps is {options.steps}; give --steps at least 1")
    if options.share:
        check_file(options.share, "share", force=options.force)
    if has_driver() and not options.dry_run and not recall(ROOT).gpus:
        examined(console, ROOT, set())  # for a GPU that nvidia-smi does not show (WSL2)
    folder = _folder(options)
    if options.dry_run:
        return _dry_run(_session(options, folder, recall(folder), console))
    if options.share:
        machine = recall(folder)
        name = store.device(options.device or machine.device, machine).name
        own = [one for one in store.every(store.OWN) if one.device.name == name]
        kept = store.choose(own, torch=store.torch())
        if kept is not None:
            return _share(kept.calibration, options.share, console)
    _sighted(options.device or recall(folder).device, recall(folder))
    check_out(folder, FILES, force=options.force)
    return _calibrated(_session(options, folder, examined(console, folder, OPS), console), options)


def _calibrated(session: Session, options: argparse.Namespace) -> int:
    """Run stations and rows, and write and show the calibration; return the exit code."""
    try:
        outcomes, results = run_stations(session), run_rows(session)
    except (process.Interrupted, SuiteInterrupted, KeyboardInterrupt):
        session.tell("interrupted; finished stations are kept, and the same command resumes")
        return INTERRUPTED
    found = calibration_of(session, outcomes, results)
    found.write(session.folder / "calibration.json")
    _show(found, keep(session, found), session)
    if options.share:
        _share(found, options.share, session.console)
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
    if not options.dry_run:
        _sighted(device, machine)
    setting = Setting(
        device=device,
        gpus=len(machine.gpus) or int(device == "cuda"),
        gpu_bytes=machine.smallest_gpu_bytes or 80 * 2**30,
        small=options.small,
        model=options.model,
        steps=options.steps,
    )
    return Session(
        folder=folder,
        machine=machine,
        setting=setting,
        console=console,
        fresh=options.fresh,
        known=_known(options, device, machine),
    )


def _known(options: argparse.Namespace, device: str, machine: Machine) -> list[Result]:
    """Return the results in ``--rows`` that are from this device and ended well."""
    if options.rows is None:
        return []
    own = store.device(device, machine)
    ended = (r for r in load_all(options.rows)[0] if r.status is Status.OK and not r.spec.repeat)
    found = [result for result in ended if measured_on(result.environment, own)]
    if not found:
        raise SpecError(f"{options.rows}: no results of {own.name} in it; give another --rows DIR")
    return found


def _sighted(device: str, machine: Machine) -> None:
    """Refuse a missing GPU; with a driver, only after torch has looked for it."""
    asked = machine.probe is not None or not has_driver()
    if device == "cuda" and not machine.gpus and asked:
        raise SpecError("device is cuda, but torch sees no GPU here; use --device cpu")
    lack = lacks_sight(machine) if device == "cuda" else None
    if lack:
        raise SpecError(str(lack))


# ---- output ----


def _dry_run(session: Session) -> int:
    device = session.setting.device
    todo = [(name, MINUTES[device][name]) for name in session.stations]
    todo = [(name, cost) for name, cost in todo if not session.earlier(name)]
    if not session.known:
        rows = specs(session.setting)
        todo += [(f"{s.recipe}, batch {s.global_batch}", ROW_MINUTES[device]) for s in rows]
    spent = sum(cost for _, cost in todo)
    session.tell(f"{len(todo)} stations and rows, about {spent:.0f} minutes on a free machine")
    heads = {"#": "count", "Station or row": "text", "Minutes": "ratio"}
    found = [[str(index), name, f"{cost:.1f}"] for index, (name, cost) in enumerate(todo, 1)]
    print_grid(text_grid("stations", "", heads, found), session.console, least_worth=())
    return OK


def _show(found: Calibration, kept: Path | None, session: Session) -> None:
    """Print the table and write it as a page; say whether predictions use the calibration."""
    grid, page = table(found), session.folder / "calibration.md"
    text = f"# {grid.title}\n\n{table_lines(grid)}\n\n{grid.note}\n"
    page.write_text(text, encoding="utf-8")
    print_grid(grid, session.console, least_worth=())
    session.tell(grid.note)
    if kept:
        words = store.applied(found, torch=store.torch()).words
        session.tell(f"{words} Predictions use it from now on: {short(kept)}")
    else:
        session.tell("Predictions do not use it: it was a rehearsal, or nothing was measured.")
    if not session.known:
        session.tell(f"{RUN} report {short(session.folder / 'rows')} compares memory and times")
    session.tell(str(short(page)))


def _share(calibration: Calibration, path: Path, console: Console) -> int:
    """Write the calibration to a file that others can use."""
    public(calibration, SHARED).write(path)
    text = f"{RUN} plan --calibration {path.name} uses it, as does one in {short(store.OWN)}"
    console.print(Text(f"{short(path)}: {text}"), soft_wrap=True)
    return OK

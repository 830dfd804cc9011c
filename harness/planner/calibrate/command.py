"""The ``calibrate`` command: measure and store the rates and overheads that predictions use."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from harness import RESULTS, ROOT, RUN
from harness.commands.console import FAILED, INTERRUPTED, OK, examined, make_console, short, slug
from harness.commands.options import add_force, add_json, check_file, write_answer
from harness.commands.progress import Predictions, during
from harness.planner import overhead, pool
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
from harness.planner.calibrate.table import lines, table, tables
from harness.planner.calibration import store
from harness.planner.calibration.record import Calibration, public
from harness.planner.speed import rates
from harness.planner.speed.rates import measured_on
from harness.planner.speed.roofline import Seconds, seconds
from harness.prediction import Prediction, Work
from harness.report.data.grid import Grid, text_grid
from harness.report.figures import derive
from harness.report.rendering.table import print_grid
from harness.resolve import resolve
from harness.result import Result, Status, load_all
from harness.spec import DEVICES, SpecError
from harness.suite.run import SuiteInterrupted, check_out
from harness.system import cards, process
from harness.system.cards import Card
from harness.system.gpus import has_driver
from harness.system.machine import Machine, recall
from harness.system.requirements import lacks_sight
from harness.void import shown_status

# ---- comparison with results ----


@dataclass(frozen=True, kw_only=True)
class Held:
    """A measured step time in seconds, and the work from which it is predicted."""

    recipe: str
    processes: int
    work: tuple[Work, ...]
    measured: float

    def predicted(self, card: Card) -> Seconds:
        """Return the step time by the rates of ``card``."""
        return seconds(self.work, card, self.processes, self.recipe)

    def error(self, card: Card) -> float:
        """Return (predicted - measured) / measured."""
        return self.predicted(card).total / self.measured - 1


def held(results: Sequence[Result], predictions: Mapping[str, Prediction]) -> list[Held]:
    """Return the rows that ended well and have a prediction with work, without repetitions."""
    rows = []
    for result in results:
        found = predictions.get(result.spec.key)
        good = shown_status(result)[0].value == "ok" and not result.spec.repeat
        if good and found and found.work:
            rows.append(
                Held(
                    recipe=result.spec.recipe,
                    processes=result.spec.processes,
                    work=tuple(found.work),
                    measured=derive.quantile(derive.step_seconds(result), 0.5),
                )
            )
    return sorted(rows, key=lambda row: row.measured)


def compared(rows: Sequence[Held], card: Card) -> Grid:
    """Return each row's time by typical figures and by ``card``'s calibration, with errors."""
    ways = {"typical": dataclasses.replace(card, calibrated=None)}
    ways |= {"calibrated": card} if card.calibrated else {}
    heads = ["Row", "Processes", "Measured ms"]
    for name in ways:
        heads += [f"{name.capitalize()} ms", "Error %"]
    lines = [
        [row.recipe, str(row.processes), f"{1e3 * row.measured:.0f}",
         *(cell for one in ways.values() for cell in _cells(row, one))]
        for row in rows
    ]  # fmt: skip
    note = " ".join(_summary(name, rows, one) for name, one in ways.items())
    return table(f"Steps of {card.name}, planned and measured", heads, lines, note)


def _cells(row: Held, card: Card) -> list[str]:
    found = row.predicted(card)
    error = f"{100 * row.error(card):+.0f}"
    return [found.words, error]


def _summary(name: str, rows: Sequence[Held], card: Card) -> str:
    if not rows:
        return ""
    errors = [abs(row.error(card)) for row in rows]
    pairs = [(row.predicted(card), row.measured) for row in rows]
    within = sum(found.low <= measured <= found.high for found, measured in pairs)
    middle, worst = 100 * statistics.median(errors), 100 * max(errors)
    said = f"{name.capitalize()}: median error {middle:.0f} %, largest {worst:.0f} %"
    return f"{said}, {within} of {len(rows)} within the uncertainty."


def against(options: argparse.Namespace, console: Console) -> int:
    """Predict the times of the results in ``options.against``, with and without the calibration
    of their device; return the exit code.
    """
    results = _results(options.against)
    card = _card(results[0])
    rows = held(results, _predictions(results, console))
    if options.json:
        write_answer(options, {"rows": [dataclasses.asdict(row) for row in rows]})
    console.print(
        escape(lines(f"Against {options.against}", [compared(rows, card)])), soft_wrap=True
    )
    console.print(escape(rates.words(card)), highlight=False)
    return 0


def _results(folder: Path) -> list[Result]:
    """Return the results that ended well on one machine, without repetitions."""
    found = [r for r in _ended_well(folder) if r.spec.nodes == 1]
    if not found:
        raise SpecError(f"{folder}: no results in it; give a folder that {RUN} run made")
    return found


def _ended_well(folder: Path) -> list[Result]:
    return [r for r in load_all(folder)[0] if r.status is Status.OK and not r.spec.repeat]


def _card(result: Result) -> Card:
    """Return the device of the results, with its stored calibration if there is one."""
    facts = result.environment
    alike = [one for one in store.every() if rates.measured_on(facts, one.device)]
    found = store.choose(alike)
    if found is not None:
        card = rates.of_environment(facts, found.calibration)
        assert card is not None
        return card
    name = str(facts.get("device") or "")
    card = cards.named(name)
    if card is None and name == "cpu":
        card = cards.of_cpu(str(facts["cpu"]), int(facts["cores"]), int(facts["memory_bytes"]))
    if card is None:
        raise SpecError(f"{name} is not in the table of cards and was not calibrated; run "
                        f"{RUN} calibrate there first")  # fmt: skip
    return card


def _predictions(results: Sequence[Result], console: Console) -> dict[str, Prediction]:
    rows = [resolve(result.spec) for result in results]
    kind = overhead.taken(results[0].environment)
    progress = Predictions(console)
    with during(progress, [str(row.recipe) for row in rows]):
        found = pool.predict_all(rows, pool.default_folder(), kind=kind, done=progress.done)
    return {row.spec.key: prediction for row, prediction in zip(rows, found, strict=True)}


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
    text = ("compare the results in DIR with times planned with and without the calibration "
        "(default: calibrate)")  # fmt: skip
    add("--against", type=Path, metavar="DIR", help=text)
    add_json(parser)
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
    _check(options)
    if options.against:
        return against(options, console)
    if has_driver() and not options.dry_run and not recall(ROOT).gpus:
        examined(console, ROOT, set())  # for a GPU that nvidia-smi does not show (WSL2)
    folder = _folder(options)
    if options.dry_run:
        return _dry_run(_session(options, folder, recall(folder), console))
    if options.share:
        kept = store.choose(_own(options, recall(folder)), torch=store.torch())
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
    made = tables(found)
    found.write(session.folder / "calibration.json")
    page = session.folder / "calibration.md"
    page.write_text(lines(f"Calibration of {found.device.name}", made), encoding="utf-8")
    _show(found, made, keep(session, found), session)
    session.tell(str(short(page)))
    if options.share:
        _share(found, options.share, session.console)
    able = (Status.OK, Status.UNSUPPORTED, Status.REFUSED)
    good = all(r.status in able for r in results) and all(o.status == "ok" for o in outcomes)
    return OK if good else FAILED


def _check(options: argparse.Namespace) -> None:
    if options.steps < 0:
        raise SpecError(f"steps is {options.steps}; give --steps at least 1")
    if options.share:
        check_file(options.share, "share", force=options.force)
    if options.json and not options.against:
        raise SpecError("--json writes the comparison of --against; give --against DIR")


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
    found = [r for r in _ended_well(options.rows) if measured_on(r.environment, own)]
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


def _show(found: Calibration, made: Sequence[Grid], kept: Path | None, session: Session) -> None:
    for grid in made:
        print_table(grid, session.console)
    if kept:
        words = store.applied(found, torch=store.torch()).words
        session.tell(f"{words} Predictions use it from now on: {short(kept)}")
    else:
        session.tell("Predictions do not use it: it was a rehearsal, or nothing was measured.")
    if not session.known:
        session.tell(f"{RUN} report {short(session.folder / 'rows')} compares memory and times")


def print_table(grid: Grid, console: Console) -> None:
    """Print one table and its note."""
    console.print(f"[italic]{escape(grid.title)}[/italic]", highlight=False)
    print_grid(grid, console, least_worth=())
    if grid.note:
        console.print(escape(grid.note), highlight=False)


def _own(options: argparse.Namespace, machine: Machine) -> list[Calibration]:
    """Return the stored calibrations of this machine's device."""
    name = store.device(options.device or machine.device, machine).name
    return [one for one in store.every(store.OWN) if one.device.name == name]


def _share(calibration: Calibration, path: Path, console: Console) -> int:
    """Write the calibration to a file that others can use."""
    public(calibration, SHARED).write(path)
    text = f"{RUN} plan --calibration {path.name} uses it, as does one in {short(store.OWN)}"
    console.print(Text(f"{short(path)}: {text}"), soft_wrap=True)
    return OK

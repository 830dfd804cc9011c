"""``./run.sh run``, the default command: measure, predict and report a suite."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from harness import ROOT, extensions
from harness.commands import listing
from harness.commands.console import (
    INTERRUPTED,
    OK,
    Progress,
    examined,
    exit_code,
    make_console,
    sighted,
    slug,
)
from harness.commands.options import add_settings, folder_name, seconds
from harness.commands.reports import show
from harness.launch import launch
from harness.planner import overhead, pool
from harness.planner.plan.tracing import PlanProgress
from harness.planner.prediction import Prediction
from harness.planner.prediction import kept as kept_prediction
from harness.planner.speed import rates
from harness.report import write_report
from harness.report.data.rows import label
from harness.report.figures.predicted import FILE, OUT_OF_MEMORY
from harness.resolve import Resolved, resolve, run_name
from harness.result import Result, Status, load_all
from harness.spec import Spec, SpecError
from harness.suite import matrix
from harness.suite.file import Suite
from harness.suite.rows import places, with_reference_again
from harness.suite.run import OutputError, Planned, SuiteInterrupted, check_out, plan, run_suite
from harness.system.gpus import has_driver
from harness.system.machine import Machine, recall
from harness.system.requirements import lacks_sight, needed_ops
from harness.system.tree import at_work
from strategies.base import GPUS
from strategies.subject import DataFacts
from strategies.workloads import TRAIN

SUITE_S = {f.name: f"the suite's, else {f.default}" for f in dataclasses.fields(Spec)}
"""Default of each setting, as the help shows it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run``."""
    what, add = parser.add_mutually_exclusive_group(), parser.add_argument
    told = "which (default: default, or sampling); ./run.sh list names them"
    what.add_argument("--suite", metavar="NAME_OR_FILE", help=told)
    told = (
        "recipes instead, the first the reference (default: none, a suite, whose settings they get)"
    )
    what.add_argument("--recipes", nargs="+", metavar="R", help=told)
    add("--repeat", type=int, metavar="N", help="measure every recipe N times (default: 1)")
    told = "measure the reference N times over the suite (default: the suite's, else 3; 1: once)"
    add("--noise-floor", type=int, metavar="N", help=told)
    add("--timeout", type=seconds, metavar="SECONDS", help="deadline of one run (default: suite's)")
    add("--out", type=folder_name, metavar="DIR", help="results folder (default: results/SUITE)")
    add("--fresh", action="store_true", help="repeat finished runs too (default: keep them)")
    add("--no-predictions", action="store_true", help="do not predict what was measured")
    told = "rows of one GPU, N at a time, for their memory alone (default: one after another)"
    add("--side-by-side", type=int, metavar="N", help=told)
    add("--dry-run", action="store_true", help="print the commands, start nothing")
    for more in extensions.hooks("run_arguments"):
        more(parser)
    settings = parser.add_argument_group("settings of every row (they win over the suite's)")
    add_settings(settings, "recipe", "repeat", defaults=SUITE_S, sampling=True)


def run(options: argparse.Namespace, given: Mapping[str, Any]) -> int:
    """Run a suite, print its table and the names of the report's files; return the exit code."""
    console = make_console()
    usual = matrix.SUITES.get(given.get("workload", TRAIN), "default")
    name = "recipes" if options.recipes else options.suite or usual
    out = Path(options.out or ROOT / "results" / slug(name)).absolute()
    for run_elsewhere in extensions.hooks("elsewhere"):
        if (code := run_elsewhere(options, out, slug(name), console)) is not None:
            return code
    rows, here = AskedRows(options, given), recall(out)
    if not options.dry_run:
        here = sighted(console, out, here, options.device)
    _, planned = rows.planned(out, here)
    if options.dry_run:
        return _dry_run(planned, recall(out), rows.changes)
    if options.side_by_side is not None:
        places(here, options.side_by_side)
    _enough_gpus(given, planned)
    check_out(out)
    machines = extensions.hook("machines", lambda *_: contextlib.nullcontext())
    with machines(options, out, console) as nodes:
        planned, results, code = _measured(rows, planned, nodes, out, options, console)
    if code is None and results and not options.no_predictions:
        # Predictions take minutes and may be interrupted, so the report is written before them.
        write_report(results, [], out, lost=[])
        whole = predict_measured(results, [row.resolved for row in planned], out, console)
        code = None if whole else INTERRUPTED
    show(results, load_all(out)[1], out, console)
    if code == INTERRUPTED:
        console.print(
            f"interrupted after {ended(results)} of {len(planned)} runs; the same command resumes"
        )
    return exit_code(results) if code is None else code


def _measured(
    rows: AskedRows,
    planned: Sequence[Planned],
    nodes: Any,
    out: Path,
    options: argparse.Namespace,
    console: Console,
) -> tuple[list[Planned], list[Result], int | None]:
    """Return the rows as planned after the machine is examined, and their results.

    The third value is the exit code if it is decided already, else None. ``nodes`` are several
    machines (hook "machines"), or None.
    """
    runnable = [row.resolved for row in planned if not row.resolved.refusal]
    ops = needed_ops(runnable)
    machine = examined(console, out, ops)
    if nodes:
        device = options.device or machine.device
        machine = nodes.survey(machine, out, device, sorted(ops), console)
    suite, planned = rows.planned(out, machine)
    _sighted(suite, machine)
    for change in [*rows.changes, *([] if options.device else _unseen(suite, machine))]:
        console.print(change, style="yellow")
    _alone_here(console)
    many, progress, code = options.side_by_side, Progress(console), None
    gpus = () if many is None else places(machine, many)
    try:
        results = run_suite(
            suite,
            planned,
            out,
            machine=machine,
            progress=progress,
            fresh=options.fresh,
            timeout=options.timeout,
            start=nodes.start if nodes else None,
            gpus=gpus,
        )
    except (OutputError, launch.LaunchError):
        if progress.done:  # a full disk: rows measured before are still reported
            show(*load_all(out), out, console)
        raise
    except SuiteInterrupted as stop:
        options.ending.begun = True  # further signals must not cut the report short
        results, code = stop.results, INTERRUPTED
    names = machine.device_names if suite.device == "cuda" else ["cpu"]
    rates.keep_beside(out, next(iter(names), ""))
    return planned, results, code


def ended(results: Sequence[Result]) -> int:
    """Return the number of runs that were not interrupted."""
    return sum(result.status is not Status.INTERRUPTED for result in results)


class AskedRows:
    """The requested rows, planned twice: before and after the machine is examined.

    Each spec is resolved once, and each data folder is read once. A spec is resolved again only if
    the examined machine changes it, because GPU memory may decide the batch. ``changes`` describe
    the edits that its processes made to the suite.
    """

    def __init__(self, options: argparse.Namespace, given: Mapping[str, Any]) -> None:
        self.options, self.given = options, given
        self.resolved: dict[Spec, Resolved] = {}
        self.facts: dict[str, DataFacts] = {}
        self.changes: list[str] = []

    def planned(self, out: Path, machine: Machine) -> tuple[Suite, list[Planned]]:
        """Return the suite and its checked rows. Bad input is refused here, before any process
        starts."""
        asked = self._suite(machine)
        gpus = len(machine.gpus) * max(1, self.given.get("nodes", 1))
        suite, self.changes = matrix.on_processes(asked, self.given, gpus=gpus)
        specs = matrix.specs(
            suite,
            self.given,
            gpus=gpus,
            gpu_bytes=machine.smallest_gpu_bytes,
        )
        often = self.options.noise_floor
        often = suite.noise_floor if often is None else often
        specs = with_reference_again(specs, suite.reference, often)
        return suite, plan([self._resolved(spec) for spec in specs], out, machine)

    def _resolved(self, spec: Spec) -> Resolved:
        if spec not in self.resolved:
            self.resolved[spec] = resolve(spec, self.facts.get(spec.data))
            self.facts[spec.data] = self.resolved[spec].subject.data
        return self.resolved[spec]

    def _suite(self, machine: Machine) -> Suite:
        options = self.options
        device = options.device or machine.device
        if device == "cuda" and not machine.gpus and not options.dry_run:
            why = (machine.probe or {}).get("no_cuda")
            seen = f"no GPU is to be seen here{f' ({why})' if why else ''}"
            raise SpecError(f"device is cuda, and {seen}; use --device cpu")
        workload = self.given.get("workload", TRAIN)
        if options.recipes:
            return matrix.ad_hoc(options.recipes, device, workload)
        return listing.load(options.suite or matrix.SUITES.get(workload, "default"), device)


def _enough_gpus(given: Mapping[str, Any], planned: Sequence[Planned]) -> None:
    """Refuse an explicit --processes above the number of GPUs: it is a typing error, and no reason
    to report every row as unsupported."""
    for row in planned:
        if "processes" in given and row.lack and row.lack.about == GPUS:
            raise SpecError(str(row.lack))


def _alone_here(console: Console) -> None:
    """Warn if another Headroom runs on this machine, even if it writes to another folder."""
    others = at_work()
    if others:
        console.print(
            f"another Headroom is at work on this machine (process {', '.join(map(str, others))}): "
            "the times of both will be too long; wait for it, and run this again with --fresh",
            style="yellow",
        )


def _sighted(suite: Suite, machine: Machine) -> None:
    """Refuse the whole suite if torch cannot use the GPUs, because no row could run."""
    lack = lacks_sight(machine) if suite.device == "cuda" else None
    if lack:
        raise SpecError(str(lack))


def _unseen(suite: Suite, machine: Machine) -> list[str]:
    """Return a warning if a driver is installed but the suite runs on the CPU because neither
    nvidia-smi nor torch finds a GPU."""
    why = (machine.probe or {}).get("no_cuda")
    if suite.device != "cpu" or machine.gpus or not why or not has_driver():
        return []
    return [f"a driver of GPUs is here, and torch sees none ({why}): this runs on the CPU"]


def _dry_run(planned: Sequence[Planned], machine: Machine, changes: Sequence[str]) -> int:
    """Print the command of each row for a shell, and a comment line for a row that cannot run."""
    if machine.probe is None:
        print("# ops and backends were not probed yet; ./run.sh doctor does")
    for change in changes:
        print(f"# {change}")
    for index, row in enumerate(planned, 1):
        print(f"# {index}/{len(planned)} {label(row.resolved.spec)}" + _why_not(row))
        prefix = "# " if row.status else ""
        print(prefix + launch.display(row.resolved, row.folder))
    return OK


def _why_not(row: Planned) -> str:
    if row.status is None:
        return "".join(f" ({note})" for note in row.notes)
    return f": {row.status.value}: {row.lack.text} -> {row.lack.hint}"


# ---- predictions of measured rows ----


def predict_measured(
    results: Sequence[Result], rows: Sequence[Resolved], out: Path, console: Console
) -> bool:
    """Predict what each measured row needs, and store the prediction beside its result.

    Rows that ran out of memory are predicted too, to check whether the prediction says so.
    Predictions follow all runs, so they disturb no measurement, and their failure does not fail the
    command. Return False if the user interrupts them.
    """
    done = [r for r in results if r.status in (Status.OK, *OUT_OF_MEMORY)]
    of_spec = {row.spec: row for row in rows}
    once = {dataclasses.replace(r.spec, repeat=0): r.spec for r in reversed(done)}.values()
    wanted = [r.spec for r in done if r.spec in once]  # repetitions share one prediction
    missing = [of_spec[s] for s in wanted if not kept_prediction(_prediction_file(s, out))]
    if not missing:
        return True
    # The rows ran on one machine, so any environment that names its attention backend serves. A row
    # that died early recorded none.
    environment = next((r.environment for r in done if "attention" in r.environment), {})
    kind = overhead.taken(environment)
    progress = PlanProgress(console)
    progress.begin([str(row.recipe) for row in missing], pool.default_jobs())

    def keep(index: int, prediction: Prediction) -> None:
        with contextlib.suppress(OSError):
            prediction.write(_prediction_file(missing[index].spec, out))
        progress.done(index, prediction)

    try:
        pool.predict_all(missing, out / "predictions", kind=kind, done=keep)
    except KeyboardInterrupt:
        return False  # the report can still be made from the results
    return True


def _prediction_file(spec: Spec, out: Path) -> Path:
    return out / "runs" / run_name(spec) / FILE

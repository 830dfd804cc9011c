"""``./run.sh run``, the default command: measure and report a suite."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from harness import RESULTS, RUN, hooks
from harness.commands.console import (
    INTERRUPTED,
    OK,
    examined,
    exit_code,
    looked,
    make_console,
    slug,
)
from harness.commands.options import add_force, add_settings, folder_name, overrides, seconds
from harness.commands.progress import Progress
from harness.commands.reports import show
from harness.files import OutputError
from harness.launch import launch, nodes
from harness.report.data.rows import label
from harness.resolve import Resolved, resolve
from harness.result import Result, Status, load_all
from harness.spec import Spec, SpecError
from harness.suite import matrix
from harness.suite.file import Suite, load_suite
from harness.suite.rows import with_reference_again
from harness.suite.run import Planned, SuiteInterrupted, check_out, plan, run_suite
from harness.system.gpus import has_driver
from harness.system.machine import Machine
from harness.system.requirements import lacks_sight, needed_ops, obstacle
from harness.system.tree import at_work
from strategies.base import GPUS
from strategies.workloads import TRAIN

SUITE_S = {f.name: f"the suite's, else {f.default}" for f in dataclasses.fields(Spec)}
"""Default of each setting, as the help shows it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what, add = parser.add_mutually_exclusive_group(), parser.add_argument
    text = f"suite to run; {RUN} list suites shows them (default: default, or sampling)"
    what.add_argument("--suite", metavar="NAME_OR_FILE", help=text)
    text = "run these recipes with the suite's settings; the first is the reference "
    text += "(default: a suite's recipes)"
    what.add_argument("--recipes", nargs="+", metavar="R", help=text)
    add("--repeat", type=int, metavar="N", help="measure every recipe N times (default: 1)")
    text = "measure the reference N times, spread over the suite (default: the suite's, else 3; "
    add("--noise-floor", type=int, metavar="N", help=f"{text}1: once)")
    text = "deadline of one run (default: the suite's)"
    add("--timeout", type=seconds, metavar="SECONDS", help=text)
    add("--out", type=folder_name, metavar="DIR", help="results folder (default: results/SUITE)")
    add_force(parser)
    add("--fresh", action="store_true", help="repeat finished runs too (default: keep them)")
    add("--dry-run", action="store_true", help="print the commands, start nothing")
    nodes.add_arguments(parser)
    hooks.planner("run_arguments")(parser)
    settings = parser.add_argument_group("settings of every row (they override the suite's)")
    add_settings(settings, "recipe", "repeat", defaults=SUITE_S, sampling=True)


def run(options: argparse.Namespace) -> int:
    """Run a suite, print its table and the names of the report's files; return the exit code."""
    console, given = make_console(), overrides(options)
    usual = matrix.SUITES.get(given.get("workload", TRAIN), "default")
    name = "recipes" if options.recipes else options.suite or usual
    out = Path(options.out or RESULTS / slug(name)).absolute()
    node = nodes.this_node(options, os.environ)
    if node:
        out = node.folder(out)
        console.print(f"node {node.rank} of {node.count}: {out}", soft_wrap=True)
    machine = looked(console, out, options.device, dry=options.dry_run)
    suite, rows = ask(options, given, machine)
    if options.dry_run:
        return _dry_run(rows, machine, out)
    for row in rows if "processes" in given else ():
        lack = None if row.refusal else obstacle(row, machine)
        if lack and lack.about == GPUS:  # an explicit number above that of the GPUs is a mistake
            raise SpecError(str(lack))
    check_out(out, force=options.force)
    known = _deciding(machine)
    machine = examined(console, out, needed_ops([row for row in rows if not row.refusal]))
    if _deciding(machine) != known:
        suite, rows = ask(options, given, machine)
    planned = plan(rows, out, machine)
    for warning in _warnings(suite, machine, options.device):
        console.print(warning, style="yellow")
    start = nodes.start_on(node, machine) if node else None
    results, code = run_rows(suite, planned, out, options, console, machine=machine, start=start)
    rows = [row.resolved for row in planned]
    code = hooks.planner("after_run")(results, rows, options, out, console, code)
    show(results, load_all(out)[1], out, console)
    if code == INTERRUPTED:
        ended = sum(result.status is not Status.INTERRUPTED for result in results)
        text = f"interrupted after {ended} of {len(planned)} runs; the same command resumes"
        console.print(text)
    return exit_code(results) if code is None else code


def _deciding(machine: Machine) -> tuple[str, int, int]:
    """Return the facts of a machine that decide rows; GPU memory may decide the batch."""
    return machine.device, len(machine.gpus), machine.smallest_gpu_bytes


def _warnings(suite: Suite, machine: Machine, asked: str | None) -> list[str]:
    """Return what disturbs the suite; refuse it if torch cannot use the GPUs of its rows."""
    if suite.device == "cuda" and (lack := lacks_sight(machine)):
        raise SpecError(str(lack))
    found = []
    why = (machine.probe or {}).get("no_cuda")
    if not asked and suite.device == "cpu" and why and not machine.gpus and has_driver():
        text = f"this machine has a GPU driver, but torch sees no GPU ({why})"
        found.append(f"{text}: the suite runs on the CPU")
    if others := at_work():  # also one that writes to another folder
        found.append(
            "another Headroom runs on this machine (process "
            f"{', '.join(map(str, others))}). Both measure times that are too long. Wait "
            "for it, and run this command again with --fresh."
        )
    return found


def run_rows(
    suite: Suite,
    planned: Sequence[Planned],
    out: Path,
    options: argparse.Namespace,
    console: Console,
    **more: Any,
) -> tuple[list[Result], int | None]:
    """Run the rows; return their results, and the exit code if it is decided already.

    A full disk ends the suite with a report of the rows that were measured before it.
    """
    progress = Progress(console)
    given = {"fresh": options.fresh, "timeout": options.timeout, **more}
    try:
        return run_suite(suite, planned, out, progress=progress, **given), None
    except OutputError:
        if progress.done:
            show(*load_all(out), out, console)
        raise
    except SuiteInterrupted as stop:
        options.ending.begun = True  # further signals must not cut the report short
        return stop.results, INTERRUPTED


def ask(
    options: argparse.Namespace, given: Mapping[str, Any], machine: Machine
) -> tuple[Suite, list[Resolved]]:
    """Return the requested suite and its rows; a BadInput refuses them at once."""
    workload, device = given.get("workload", TRAIN), options.device or machine.device
    if device == "cuda" and not machine.gpus and not options.dry_run:
        why = (machine.probe or {}).get("no_cuda")
        seen = f"torch sees no GPU here{f' ({why})' if why else ''}"
        raise SpecError(f"device is cuda, and {seen}; use --device cpu")
    if options.recipes:
        suite = matrix.ad_hoc(options.recipes, device, workload)
    else:
        usual = matrix.usual_suite(workload, device, len(machine.gpus))
        suite = load_suite(options.suite or usual, device)
    gpus = len(machine.gpus) * max(1, given.get("nodes", 1))
    specs = matrix.specs(suite, given, gpus=gpus, gpu_bytes=machine.smallest_gpu_bytes)
    often = suite.noise_floor if options.noise_floor is None else options.noise_floor
    rows: list[Resolved] = []
    facts: dict[str, Any] = {}  # each data folder is read once
    for spec in with_reference_again(specs, suite.reference, often):
        rows.append(resolve(spec, facts.get(spec.data), whole="global_batch" in given))
        facts[spec.data] = rows[-1].subject.data
    return suite, rows


def _dry_run(rows: Sequence[Resolved], machine: Machine, out: Path) -> int:
    """Print the command of each row for a shell, and a comment line for a row that cannot run."""
    planned = plan(rows, out, machine)
    if machine.probe is None:
        print(f"# ops and backends were not probed yet; {RUN} doctor probes them")
    for index, row in enumerate(planned, 1):
        more = "".join(f" ({note})" for note in row.notes)
        if row.status and row.lack:
            more = f": {row.status.value}: {row.lack.text} -> {row.lack.hint}"
        print(f"# {index}/{len(planned)} {label(row.resolved.spec)}{more}")
        print(("# " if row.status else "") + launch.display(row.resolved, row.folder))
    return OK

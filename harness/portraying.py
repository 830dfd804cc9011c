"""``./run.sh anatomy``: one recipe, run once, and a page of where its memory and time went."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from harness import commands, launch, matrix, process, suite_run
from harness.doctor import needed_ops
from harness.machine import Machine, recall
from harness.portrait import load
from harness.progress import Progress, make_console
from harness.report import derive, portrait_page
from harness.resolve import project_root
from harness.result import Result, Status
from harness.spec import SpecError
from harness.suite_run import Planned

__all__ = ["anatomy"]

WORDS = ["--anatomy"]
BRIEF = {"steps": 1, "warmup": 1}
"""The looks come after the steps; more of them would show nothing more."""


def anatomy(options: argparse.Namespace, given: Mapping[str, Any]) -> int:
    """Run, draw, and name the files; the exit code."""
    console = make_console()
    name = commands.slug(options.recipe)
    folder = Path(options.out or project_root() / "results" / "anatomy" / name).absolute()
    row = _planned(options, given, folder, recall(folder))
    if options.dry_run:
        print(_line(row))
        return commands.OK
    suite_run.check_out(folder)
    machine = commands.examined(console, folder, needed_ops([row.resolved]))
    row = _planned(options, given, folder, machine)
    progress = Progress(console)
    progress.begin_suite("anatomy", [options.recipe], [True])
    progress.begin_run(options.recipe, options.timeout)
    try:
        result = _run(row, options.timeout, progress)
    except process.Interrupted:
        progress.end_suite()
        return commands.INTERRUPTED
    progress.end_run(result)
    progress.end_suite()
    if derive.effective_status(result)[0] is not Status.OK:
        console.print(Text(result.log_tail, style="dim"))
        return commands.exit_code([result])
    _draw(folder, console)
    return commands.OK


def _planned(
    options: argparse.Namespace, given: Mapping[str, Any], folder: Path, machine: Machine
) -> Planned:
    """The one row; what stands against it is bad input here, for nothing else can run."""
    device = options.device or machine.device
    smallest = min((gpu.total_bytes for gpu in machine.gpus), default=0)
    suite = matrix.ad_hoc([options.recipe], device)
    specs = matrix.specs(suite, {**BRIEF, **given}, gpus=len(machine.gpus), gpu_bytes=smallest)
    (row,) = suite_run.plan(specs, folder, machine)
    if row.lack:
        raise SpecError(f"{options.recipe}: {row.lack.reason}; {row.lack.way_out}")
    return row._replace(folder=folder)


def _line(row: Planned) -> str:
    return f"{launch.display(row.resolved.spec, row.folder)} {shlex.join(WORDS)}"


def _run(row: Planned, timeout: float | None, progress: Progress) -> Result:
    spec = row.resolved.spec
    result = launch.run(
        row.resolved,
        row.folder,
        timeout=timeout,
        on_status=progress.status,
        argv=lambda port: [*launch.command(spec, row.folder, port=port), *WORDS],
    )
    result.command = _line(row)
    result.write(row.folder / "result.json")
    return result


def _draw(folder: Path, console: Any) -> None:
    portrait = load(folder / "anatomy.json")
    for question, answer, more in portrait_page.sentences(portrait):
        console.print(f"[bold]{question}[/bold]  {answer}: {more}", highlight=False)
    for path in [folder / "anatomy.json", *portrait_page.write(portrait, folder)]:
        console.print(Text(str(commands.short(path))), soft_wrap=True)

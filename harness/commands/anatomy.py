"""``./run.sh anatomy``: run one recipe, and write a page about its memory and time."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.text import Text

from harness import RESULTS, hooks
from harness.commands import single_run
from harness.commands.console import INTERRUPTED, OK, exit_code, make_console, short, slug
from harness.commands.options import add_force, add_settings, folder_name, overrides, seconds
from harness.commands.progress import Progress
from harness.launch import launch
from harness.memory.memory_breakdown import load
from harness.report import anatomy as page
from harness.result import Status
from harness.spec import Spec, SpecError
from harness.suite import matrix
from harness.system import process
from harness.system.machine import Machine
from harness.void import shown_status

WORDS = ["--anatomy"]
FILES = (*launch.FILES, "anatomy.json", "anatomy.html")
BRIEF = {"steps": 1, "warmup": 1}
"""The traced steps follow these; more timed steps would add nothing."""
FROM_SUITE = ("model", "data", "global_batch", "processes")
"""Settings of the suite "default", for a recipe alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="strategies joined by +")
    add = parser.add_argument
    add("--out", type=folder_name, metavar="DIR", help="folder (default: results/anatomy/RECIPE)")
    add_force(parser)
    add("--timeout", type=seconds, metavar="SECONDS", help="deadline (default: none)")
    add("--dry-run", action="store_true", help="print the command, start nothing")
    usual = {**BRIEF, **dict.fromkeys(FROM_SUITE, "as in the suite default")}
    left = ("recipe", "repeat", "profile", "snapshot")
    add_settings(parser.add_argument_group("settings"), *left, defaults=usual)


def anatomy(options: argparse.Namespace) -> int:
    """Run the recipe, write its page and print the files' names; return the exit code."""
    console, given = make_console(), overrides(options)
    name = slug(options.recipe)
    folder = Path(options.out or RESULTS / "anatomy" / name).absolute()

    def ask(machine: Machine) -> Spec:
        suite = matrix.ad_hoc([options.recipe], options.device or machine.device)
        here = {"gpus": len(machine.gpus), "gpu_bytes": machine.smallest_gpu_bytes}
        (spec,) = matrix.specs(suite, BRIEF | given, **here)  # given values win
        if given.get("processes", spec.processes) != spec.processes:
            text = f"processes is {given['processes']}, but {options.recipe} trains on one process"
            raise SpecError(f"{text}; leave --processes out")
        return spec

    if options.dry_run:
        _, row = single_run.planned(ask, folder, options.device)
        print(launch.display(row.resolved, row.folder, WORDS))
        return OK
    _, row = single_run.checked(ask, folder, FILES, options, console)
    try:
        result = single_run.launched(row, "anatomy", Progress(console), options.timeout, WORDS)
    except process.Interrupted:
        print("interrupted; no result was kept", file=sys.stderr)
        return INTERRUPTED
    if shown_status(result)[0] is not Status.OK:
        console.print(Text(result.log_tail, style="dim"))
        return exit_code([result])
    breakdown = hooks.planner("under_ceilings")(load(folder / "anatomy.json"))
    for question, answer, more in page.section(breakdown)["answers"]:
        console.print(f"[bold]{question}[/bold]  {answer}: {more}", highlight=False)
    for path in [folder / "anatomy.json", *page.write(breakdown, folder)]:
        console.print(Text(str(short(path))), soft_wrap=True)
    return OK

"""Planning, checks and launch shared by the commands that run one recipe."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.commands.console import examined, looked, make_console
from harness.commands.progress import Progress
from harness.launch import launch
from harness.resolve import Resolved, resolve
from harness.result import Result
from harness.spec import Spec, SpecError
from harness.suite.run import Planned, check_out, plan
from harness.system.machine import Machine
from harness.system.requirements import needed_ops
from strategies import parse

Ask = Callable[[Machine], Spec]
"""Returns the requested spec; the machine decides the settings that were not given."""


def usual(recipe: str, device: str | None, machine: Machine) -> dict[str, Any]:
    """Return default spec fields: the recipe, this machine's device, and all of its GPUs."""
    device = device or machine.device
    many = device == "cuda" and not parse(recipe).alone(device)
    processes = max(1, len(machine.gpus)) if many else 1
    return {"recipe": recipe, "device": device, "processes": processes}


def planned(
    ask: Ask, folder: Path, device: str | None, console: Console | None = None
) -> tuple[Machine, Planned]:
    """Return the machine and the row; a BadInput refuses it before a process starts."""
    machine = looked(console or make_console(stderr=True), folder, device)
    return machine, _possible(resolve(ask(machine)), folder, machine)


def checked(
    ask: Ask,
    folder: Path,
    names: Sequence[str],
    options: argparse.Namespace,
    console: Console,
) -> tuple[Machine, Planned]:
    """Create ``folder``, examine the machine and compile the row's ops; return machine and row.

    ``names`` are those of the files that the command writes to ``folder``.

    Raises:
        BadInput: the row cannot run, or ``folder`` has files of somebody else.
        OutputError: ``folder`` cannot be written.
    """
    _, row = planned(ask, folder, options.device, console)
    check_out(folder, names, force=options.force)
    machine = examined(console, folder, needed_ops([row.resolved]))
    spec = ask(machine)
    resolved = row.resolved if spec == row.resolved.spec else resolve(spec)
    return machine, _possible(resolved, folder, machine)


def launched(
    row: Planned, command: str, progress: Progress, timeout: float | None, more: Sequence[str]
) -> Result:
    """Run the row with its progress; ``more`` are words for the worker that no spec has."""
    recipe = row.resolved.spec.recipe
    progress.begin_suite(command, [recipe], [True])
    progress.begin_run(recipe, timeout)
    try:
        result = launch.run(
            row.resolved, row.folder, timeout=timeout, on_status=progress.status, more=more
        )
    finally:
        progress.stop()
    progress.end_run(result)
    return result


def _possible(resolved: Resolved, folder: Path, machine: Machine) -> Planned:
    (row,) = plan([resolved], folder, machine)
    if row.lack:
        recipe = resolved.spec.recipe
        prefix = "" if row.lack.about == recipe else f"{recipe}: "
        raise SpecError(f"{prefix}{row.lack}")
    return row._replace(folder=folder)

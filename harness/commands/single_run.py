"""A command that runs one recipe: what it runs on, and what stands against it, in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.commands.console import examined, make_console, sighted
from harness.resolve import Resolved, resolve
from harness.spec import Spec, SpecError
from harness.suite.run import Planned, check_out, plan
from harness.system.machine import Machine, recall
from harness.system.requirements import needed_ops
from strategies import parse

Ask = Callable[[Machine], Spec]
"""The spec that was asked for; what was left open is the machine's."""


def usual(recipe: str, device: str | None, machine: Machine) -> dict[str, Any]:
    """Spec fields where nothing is said: this machine's device, and all of its GPUs."""
    device = device or machine.device
    many = device == "cuda" and not parse(recipe).alone(device)
    processes = max(1, len(machine.gpus)) if many else 1
    return {"recipe": recipe, "device": device, "processes": processes}


def planned(
    ask: Ask, folder: Path, device: str | None, console: Console | None = None
) -> tuple[Machine, Planned]:
    """The row, checked as far as that takes no process; only where ``device`` (as it was asked
    for) is a GPU that nothing else sees is torch asked.

    Raises:
        BadInput: the row cannot run. It is all that the command was asked for.
    """
    machine = sighted(console or make_console(stderr=True), folder, recall(folder), device)
    return machine, _possible(resolve(ask(machine)), folder, machine)


def checked(
    ask: Ask, folder: Path, device: str | None, console: Console
) -> tuple[Machine, Planned]:
    """The same with the machine examined and the row's ops compiled; ``folder`` is made.

    Raises:
        BadInput: as ``planned``. OutputError: ``folder`` cannot be written.
    """
    _, row = planned(ask, folder, device, console)
    check_out(folder)
    machine = examined(console, folder, needed_ops([row.resolved]))
    spec = ask(machine)
    resolved = row.resolved if spec == row.resolved.spec else resolve(spec)
    return machine, _possible(resolved, folder, machine)


def _possible(resolved: Resolved, folder: Path, machine: Machine) -> Planned:
    (row,) = plan([resolved], folder, machine)
    if row.lack:
        recipe = resolved.spec.recipe
        about = "" if row.lack.reason.startswith(f"{recipe}: ") else f"{recipe}: "
        raise SpecError(f"{about}{row.lack.reason}; {row.lack.way_out}")
    return row._replace(folder=folder)

"""Extensions: packages of ``harness`` that add commands and hooks to the core, and can be deleted.

The module ``harness/NAME/register.py`` of an extension imports nothing but this module. It holds
tables by name: ``COMMANDS`` of ``Command``, and ``HOOKS`` of "module:function". The core never
imports an extension: it looks up all of them by name.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

EXTENSIONS: dict[str, tuple[str, ...]] = {
    "planner": ("plan", "export", "oom", "atlas", "calibrate", "--no-predictions"),
    "sampling": ("sample",),
    "analyses": (),
    "script": ("script",),
}
"""Package below ``harness`` -> its commands, workloads and options for commands of others.

The error for a missing extension is made from this table."""


class Command(NamedTuple):
    """A command as ``./run.sh --help`` shows it.

    ``arguments`` and ``act`` are "module:function". The first adds the options to a parser. The
    second takes the parsed options and returns the exit code.
    """

    help: str
    example: str
    page: str
    arguments: str
    act: str


def load(place: str) -> Callable[..., Any]:
    """Import and return a "module:function"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def _register(extension: str) -> ModuleType | None:
    """Return the extension's table; None if the extension is not installed."""
    package = f"harness.{extension}"
    try:
        return importlib.import_module(f"{package}.register")
    except ModuleNotFoundError as error:
        if error.name not in (package, f"{package}.register"):
            raise
        return None


def commands() -> dict[str, Command]:
    """Return the commands of the installed extensions."""
    return _all("COMMANDS")


def _all(kind: str) -> dict[str, Any]:
    tables = (getattr(_register(name), kind, {}) for name in EXTENSIONS)
    return {name: entry for table in tables for name, entry in table.items()}


def missing(word: str) -> str:
    """Return an error text if a missing extension has this command, workload or option; else
    empty."""
    for name, own in EXTENSIONS.items():
        if word in own and _register(name) is None:
            return f"{word} is not installed: harness/{name} is missing"
    return ""


def hooks(name: str) -> list[Callable[..., Any]]:
    """Return the functions that installed extensions register as ``name``, in the table's order."""
    tables = (getattr(_register(extension), "HOOKS", {}) for extension in EXTENSIONS)
    return [load(table[name]) for table in tables if name in table]


def hook(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that an extension registers as ``name``; ``default`` if none does."""
    return next(iter(hooks(name)), default)

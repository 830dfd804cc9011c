"""Shared console output of the commands: consoles, tables, exit codes and paths."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from harness.commands.progress import Waiting
from harness.result import Result, Status
from harness.system.machine import Machine, examine, recall
from harness.void import shown_status
from strategies.files import printable

OK, FAILED, INTERRUPTED = 0, 1, 130
FAILURES = {Status.FAILED, Status.VOID, Status.TIMEOUT, Status.HOST_OOM, Status.GPU_OOM}
FAILURES |= {Status.NODE_LOST}
LISTED = 70
"""Least terminal width, in columns, at which names and prose fit in one table."""
WIDEST = 10_000
COLUMNS = 100
"""Default width of a log file, in columns. A terminal has its own width."""


class PlainConsole(Console):
    """A console that removes terminal sequences from the text that it prints.

    Rich's highlighting is off: it takes 5 s for a cell of 16,000 digits.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            odd = segment.control is None and not segment.text.isprintable()
            yield segment._replace(text=printable(segment.text)) if odd else segment


def make_console(columns: int = COLUMNS, *, stderr: bool = False) -> Console:
    """Return a console on standard output or error, as wide as the terminal.

    In a log file it is as wide as COLUMNS says, else ``columns``.
    """
    if (sys.stderr if stderr else sys.stdout).isatty():
        return PlainConsole(stderr=stderr)
    asked = os.environ.get("COLUMNS", "")
    width = int(asked) if asked.isdecimal() and 0 < int(asked) < WIDEST else columns
    return PlainConsole(width=width, stderr=stderr)


def exit_code(results: Sequence[Result]) -> int:
    """Return 0 if at least one row is ok and every other row could not run; else 1."""
    ends = {shown_status(result)[0] for result in results}
    return FAILED if ends & FAILURES or Status.OK not in ends else OK


def slug(name: str) -> str:
    """Return a folder name for a suite's name or file."""
    return re.sub(r"[^\w.-]+", "_", Path(name).stem if Path(name).is_file() else name)


def short(path: Path) -> Path:
    """Return ``path`` relative to the working directory if it is inside."""
    with contextlib.suppress(ValueError, OSError):  # the working directory may be gone
        return path.relative_to(Path.cwd())
    return path


def examined(console: Console, out: Path, ops: set[str]) -> Machine:
    """Return the machine as torch and DeepSpeed see it, with ``ops`` compiled."""
    with Waiting(console, "checking the machine") as line:
        return examine(out, ops, on_wait=line.tell)


def print_listed(console: Console, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows whose last cell is prose: as a table, or as paragraphs on a narrow terminal."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, no_wrap=head != heads[-1], overflow="fold")
    for row in rows:
        *names, prose = [cell if isinstance(cell, Text) else Text(str(cell)) for cell in row]
        if console.width < LISTED:
            console.print(Text("  ").join(names))
            console.print(Padding(prose, (0, 0, 0, 2), expand=False))
        table.add_row(*names, prose)
    if console.width >= LISTED:
        console.print(table)


def looked(console: Console, out: Path, device: str | None, *, dry: bool = False) -> Machine:
    """Return the machine as known without torch; ``dry`` starts no process in any case.

    With torch, if a GPU was requested and nvidia-smi found none: it may be missing (WSL2, a
    container) or slow.
    """
    machine = recall(out)
    known = machine.gpus or machine.probe is not None
    if dry or device != "cuda" or known or "+cpu" in (machine.versions["torch"] or ""):
        return machine
    return examined(console, out, set())

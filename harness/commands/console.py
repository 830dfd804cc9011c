"""What the commands share: the console, exit codes, and how paths are shown."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from harness.report.figures import derive
from harness.result import Result, Status
from harness.system.machine import Machine, examine
from strategies.files import printable

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "OK",
    "examined",
    "exit_code",
    "make_console",
    "print_listed",
    "short",
    "sighted",
    "slug",
]

OK, FAILED, INTERRUPTED = 0, 1, 130
FAILURES = {Status.FAILED, Status.VOID, Status.TIMEOUT, Status.HOST_OOM, Status.GPU_OOM}
FAILURES |= {Status.NODE_LOST}
LISTED = 70
"""Columns of a terminal from which on prose has room beside names."""
WIDEST = 10_000
COLUMNS = 100
"""Of a log file; a terminal has its own width."""


class PlainConsole(Console):
    """A console whose own styles are the only terminal sequences: those in text are taken out.

    It highlights nothing by itself: rich takes 5 s for a cell of 16,000 digits.
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
    """Standard output (or error), as wide as the terminal; a log file is as wide as COLUMNS says,
    else ``columns``."""
    if (sys.stderr if stderr else sys.stdout).isatty():
        return PlainConsole(stderr=stderr)
    asked = os.environ.get("COLUMNS", "")
    width = int(asked) if asked.isdecimal() and 0 < int(asked) < WIDEST else columns
    return PlainConsole(width=width, stderr=stderr)


def exit_code(results: Sequence[Result]) -> int:
    """0 if all rows that could run are ok, and at least one row is; else 1."""
    ends = {derive.effective_status(result)[0] for result in results}
    return FAILED if ends & FAILURES or Status.OK not in ends else OK


def slug(name: str) -> str:
    """A suite's name or file as the name of a folder."""
    return re.sub(r"[^\w.-]+", "_", Path(name).stem if Path(name).is_file() else name)


def short(path: Path) -> Path:
    """``path`` as seen from the working directory, where it lies below it."""
    with contextlib.suppress(ValueError, OSError):  # the working directory may be gone
        return path.relative_to(Path.cwd())
    return path


def examined(console: Console, out: Path, ops: set[str]) -> Machine:
    """The machine as torch and DeepSpeed see it, with ``ops`` compiled."""
    with _waiting(console, "checking the machine (the first time DeepSpeed compiles its ops)"):
        return examine(out, ops)


def print_listed(console: Console, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Rows whose last cell is prose: a table, or paragraphs where the prose would have no room."""
    if console.width < LISTED:
        for *names, prose in rows:
            console.print(Text("  ").join(map(_text, names)))
            console.print(Padding(_text(prose), (0, 0, 0, 2), expand=False))
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, no_wrap=head != heads[-1], overflow="fold")
    for row in rows:
        table.add_row(*map(_text, row))
    console.print(table)


def _text(cell: Any) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def sighted(console: Console, out: Path, machine: Machine, device: str | None) -> Machine:
    """``machine``, as torch sees it where a GPU is asked for and none was seen: nvidia-smi may be
    missing (WSL2, a container) or slow. A torch that is built for CPUs sees none either way."""
    known = machine.gpus or machine.probe is not None
    if device != "cuda" or known or "+cpu" in (machine.versions["torch"] or ""):
        return machine
    return examined(console, out, set())


@contextlib.contextmanager
def _waiting(console: Console, text: str) -> Iterator[None]:
    if not console.is_terminal:
        console.print(text)
        yield
        return
    with console.status(text, spinner="line"):  # in ASCII: any terminal has it
        yield

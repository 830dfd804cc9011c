"""What the commands share: the console, exit codes, and how paths are shown."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from harness.report.data import derive
from harness.result import Result, Status
from harness.system.machine import Machine, examine

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "OK",
    "examined",
    "exit_code",
    "make_console",
    "short",
    "slug",
]

OK, FAILED, INTERRUPTED = 0, 1, 130
FAILURES = {Status.FAILED, Status.VOID, Status.TIMEOUT, Status.HOST_OOM, Status.GPU_OOM}
FAILURES |= {Status.NODE_LOST}
COLUMNS = 100
"""Of a log file; a terminal has its own width."""


def make_console(columns: int = COLUMNS) -> Console:
    """Standard output, as wide as the terminal, or ``columns`` where that is a log file."""
    return Console() if sys.stdout.isatty() else Console(width=columns)


def exit_code(results: Sequence[Result]) -> int:
    """0 if all rows that could run are ok, else 1."""
    ends = {derive.effective_status(result)[0] for result in results}
    return FAILED if ends & FAILURES else OK


def slug(name: str) -> str:
    """A suite's name or file as the name of a folder."""
    return re.sub(r"[^\w.-]+", "_", Path(name).stem if Path(name).is_file() else name)


def short(path: Path) -> Path:
    """``path`` as seen from the working directory, where it lies below it."""
    with contextlib.suppress(ValueError):
        return path.relative_to(Path.cwd())
    return path


def examined(console: Console, out: Path, ops: set[str]) -> Machine:
    """The machine as torch and DeepSpeed see it, with ``ops`` compiled."""
    with _waiting(console, "checking the machine (the first time DeepSpeed compiles its ops)"):
        return examine(out, ops)


@contextlib.contextmanager
def _waiting(console: Console, text: str) -> Iterator[None]:
    if not console.is_terminal:
        console.print(text)
        yield
        return
    with console.status(text):
        yield

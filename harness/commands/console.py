"""Shared console output of the commands: consoles, tables, exit codes, paths and progress."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from harness.phases import RUN_PHASES
from harness.report.data.rows import label
from harness.report.figures import derive
from harness.result import Result, Status
from harness.system.machine import Machine, examine
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
    """Return a console on standard output, or on standard error.

    It is as wide as the terminal. In a log file it is as wide as COLUMNS says, else ``columns``.
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
    with _waiting(console, "checking the machine (the first time DeepSpeed compiles its ops)"):
        return examine(out, ops)


def print_listed(console: Console, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows whose last cell is prose: as a table, or as paragraphs on a narrow terminal."""
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
    """Return ``machine``, examined with torch if a GPU was requested and nvidia-smi found none.

    nvidia-smi may be missing (WSL2, a container) or slow. A CPU build of torch finds no GPU either.
    """
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


# ---- progress ----


HEARTBEAT_SECONDS = 60.0
"""Seconds between two lines of a run in a log file: few lines, yet a hung run is noticed."""
ENDED = (Status.OK, Status.VOID)
"""Ends of rows that ran to completion. Only their durations predict those of the next rows."""
STYLES = {Status.OK: "green", Status.VOID: "red", Status.FAILED: "red", Status.TIMEOUT: "red"}
STYLES |= {Status.NODE_LOST: "red"}


class Progress:
    """Progress of a suite: one live line on a terminal, one line per event in a log file.

    It shows the current run, recipe, phase and step, the elapsed time, and an estimate of the
    remaining time. All times are in seconds; ``now`` is a clock that tests replace.
    """

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self.console, self.now = console, now
        self.recipes: list[str] = []
        self.to_run: list[bool] = []
        self.done = 0
        self.last: dict[str, Any] = {}
        self.spent: list[float] = []
        self.run_begun = self.said = now()
        self.recipe = ""
        self.live: Live | None = None

    # ---- events, in the order of a suite ----

    def begin_suite(self, name: str, recipes: list[str], to_run: list[bool]) -> None:
        """Begin a suite of these runs. Those not ``to_run`` are finished or cannot run here."""
        self.recipes, self.to_run = recipes, to_run
        rows = f"{len(recipes)} run{'s' * (len(recipes) != 1)}, {sum(to_run)} to do"
        self.console.print(Text.assemble("suite ", (name, "bold"), f": {rows}"))

    def begin_run(self, recipe: str, timeout: float | None) -> None:
        """Begin a row; ``timeout`` is its deadline in seconds."""
        self.recipe, self.last, self.run_begun = recipe, {}, self.now()
        self.said = self.run_begun
        if self.console.is_terminal:
            self.live = Live(
                get_renderable=self.line,
                console=self.console,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self.live.start()
        else:
            limit = f", at most {clock(timeout)}" if timeout else ""
            self._say(Text(f"{self._place()} {recipe}: begins{limit}{self._rest()}"))

    def status(self, status: dict[str, Any]) -> None:
        """Show a run's status: phase, step, of, peak_bytes, elapsed_seconds (``launch.run``)."""
        self.last = status
        if self.live is None and self.now() - self.said >= HEARTBEAT_SECONDS:
            self.said = self.now()
            self._say(Text(f"{self._place()} {self.recipe}: {self._where()}{self._elapsed()}"))

    def end_run(self, result: Result, name: str = "") -> None:
        """End the current row; ``name`` replaces its label."""
        seconds = self.now() - self.run_begun
        if result.status in ENDED:
            self.spent.append(seconds)
        self._stop()
        self._finished(result, f"  {clock(seconds)}", name)
        if result.launch and result.launch.others:
            pids = ", ".join(map(str, result.launch.others))
            text = f"another Headroom was at work meanwhile (process {pids}): measure again"
            self._say(Text(f"{' ' * len(self._head())} {text}", style="yellow"))

    def skip(self, result: Result, name: str = "") -> None:
        """Show a row that is not run: finished earlier, refused or unsupported. ``name`` replaces
        its label."""
        not_run = result.status in (Status.REFUSED, Status.UNSUPPORTED)
        self._finished(result, "" if not_run else "  (from an earlier run)", name)

    def leave_out(self, recipe: str, status: Status) -> None:
        """Show a repetition that is not run because the row itself ended as ``status``."""
        self.done += 1
        words = f" {recipe}: not run, for the row itself ended as {status.value}"
        self._say(Text.assemble((self._head(), "dim"), words))

    def end_suite(self) -> None:
        """End the suite, also after an interruption."""
        self._stop()

    # ---- lines ----

    def line(self) -> Text:
        """Return the live line, cut to the terminal's width."""
        return Text.assemble(
            (f"{self._place()} ", "dim"),
            (self.recipe, "bold"),
            f"  {self._where()}{self._elapsed()}{self._rest()}",
            no_wrap=True,
            overflow="ellipsis",
        )

    def _finished(self, result: Result, after: str, name: str) -> None:
        self.done += 1
        status, reason = shown_status(result)
        words = status.value.replace("_", " ")
        numbers = summary(result) if status is Status.OK else (reason or "")
        head = self._head()
        width = max(10, *(min(len(r), 30) for r in self.recipes)) if self.recipes else 10
        text = Text.assemble(
            (head, "dim"),
            f" {name or label(result.spec):<{width}} ",
            (f"{words:<11}", STYLES.get(status, "yellow")),
            f"  {numbers}",
            (after, "dim"),
        )
        self._say(text)
        if status is not Status.OK and result.way_out:
            self._say(Text(f"{' ' * len(head)} -> {result.way_out}", style="dim"))

    def _head(self) -> str:
        return f"[{self.done:>{len(str(len(self.recipes)))}}/{len(self.recipes)}]"

    def _say(self, text: Text) -> None:
        # soft_wrap: the terminal wraps a long reason; a log file never cuts it.
        self.console.print(text, soft_wrap=not self.console.is_terminal)

    def _stop(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _place(self) -> str:
        return f"[{self.done + 1}/{len(self.recipes)}]"

    def _where(self) -> str:
        phase, step, of = (self.last.get(key) for key in ("phase", "step", "of"))
        words = RUN_PHASES.get(phase or "start", phase or "")
        return words + (f" {step}/{of}" if of else "")

    def _elapsed(self) -> str:
        return f"  {clock(self.now() - self.run_begun)}"

    def _rest(self) -> str:
        left = self.rest_seconds()
        return "" if left is None else f"  about {clock(left)} left"

    def rest_seconds(self) -> float | None:
        """Estimate the seconds left of this row and the rows to come; None before a row has
        ended."""
        if not self.spent:
            return None
        mean, spent = statistics.fmean(self.spent), self.now() - self.run_begun
        return max(0.0, mean - spent) + mean * sum(self.to_run[self.done + 1 :])


def summary(result: Result) -> str:
    """Return the median step time and the peak of an ok row, as the report derives them.

    An untraced row has its resident high-water mark instead, labeled as such.
    """
    seconds = derive.step_seconds(result)
    peak = derive.peak_of(result.ranks)
    parts = [f"{1000 * derive.quantile(seconds, 0.5):9.1f} ms a step"] if seconds else []
    size, name = (
        (derive.resident_bytes(result.ranks), "resident") if peak is None else (peak, "peak")
    )
    return "  ".join([*parts, f"{size / 2**30:6.2f} GiB {name}"] if size is not None else parts)


def clock(seconds: float) -> str:
    """Format seconds as 12 s, 3 min 05 s or 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

"""Progress of long commands: one live line on a terminal, plain lines in a log file."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from harness.phases import RUN_PHASES
from harness.prediction import Prediction
from harness.report.data.rows import label
from harness.report.figures import derive
from harness.result import Result, Status
from harness.void import shown_status

HEARTBEAT_SECONDS = 60.0
"""Seconds between two lines of a run in a log file: few lines, yet a hung run is noticed."""
ENDED = (Status.OK, Status.VOID)
"""Ends of rows that ran to completion. Only their durations predict those of the next rows."""
NAME = 22
"""Characters of a recipe that leave room for the numbers of its run on 80 columns."""
RED = (Status.VOID, Status.FAILED, Status.TIMEOUT, Status.NODE_LOST)
STYLES = {Status.OK: "green", **dict.fromkeys(RED, "red")}


class LiveLine:
    """The live output of a command: a line that a terminal redraws, and lines that stay.

    All times are in seconds.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.begun = self.said = time.monotonic()
        self.live: Live | None = None

    def line(self) -> Text:
        raise NotImplementedError

    def rest_seconds(self) -> float | None:
        """Estimate the seconds left; None if nothing is known of them."""
        return None

    def start(self) -> None:
        """Show the line until ``stop``; a log has none."""
        self.begun = self.said = time.monotonic()
        if self.console.is_terminal and self.live is None:
            self.live = Live(
                get_renderable=self.line,
                console=self.console,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self.live.start()

    def stop(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def say(self, text: Text) -> None:
        """Print a line that stays: a terminal wraps a long reason, and a log file never cuts it."""
        self.console.print(text, soft_wrap=not self.console.is_terminal)

    def beat(self) -> bool:
        """Return whether a log file gets a line now, which it does once a minute."""
        due = self.live is None and time.monotonic() - self.said >= HEARTBEAT_SECONDS
        self.said = time.monotonic() if due else self.said
        return due

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def rest(self) -> str:
        """Return the seconds left in words, with a gap before them; empty if unknown."""
        left = self.rest_seconds()
        return "" if left is None else f"  about {clock(left)} left"

    def times(self) -> str:
        return clock(self.seconds) + self.rest()


class Waiting(LiveLine):
    """Progress of work that is one piece: its ``name``, its current step, and its seconds."""

    def __init__(self, console: Console, name: str) -> None:
        super().__init__(console)
        self.name, self.step = name, ""

    def tell(self, step: str) -> None:
        """Show ``step`` as the current one; a log gets a line for each new one."""
        if step and step != self.step:
            self.step = step
            if self.live is None:
                self.say(Text(f"{self.name}: {step}"))

    def status(self, status: dict[str, Any]) -> None:
        self.tell(phase_words(status))

    def line(self) -> Text:
        """Return the live line; it may be longer than the terminal is wide."""
        step = f": {self.step}" if self.step else ""
        return Text(f"{self.name}  {self.times()}{step}")

    def __enter__(self) -> Waiting:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Predictions(LiveLine):
    """Progress of new predictions. A log has a line at the start and then one a minute at most;
    kept predictions are not shown."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.names: list[str] = []
        self.kept: Collection[int] = ()
        self.why = self.last = self.announced = ""
        self.ended = self.count = 0
        self.days: list[str] = []

    def begin(self, names: Sequence[str], why: str = "", kept: Collection[int] = ()) -> None:
        """Start predictions, for the purpose ``why``; ``kept`` are the indices of older ones."""
        self.names, self.kept, self.why, self.last = list(names), kept, why, ""
        self.ended, self.count = 0, len(names) - len(kept)
        if not self.count:
            return
        said, text = self.said, why.rstrip(" :") or "predicting; a line a minute"
        self.start()
        if self.live is None and text != self.announced:
            self.announced = text
            self.say(Text(text))
        else:
            self.said = said  # rounds of a search are short: the minute counts over all of them

    def done(self, index: int, prediction: Prediction) -> None:
        """Count the prediction at ``index``, which has ended."""
        self.days += [prediction.recorded] if prediction.recorded else []
        if index not in self.kept:
            self.ended, self.last = self.ended + 1, self.names[index]
            if self.beat():
                self.say(self.line())

    def tell_recorded(self) -> None:
        """Print how many predictions ship with the project, and when they were made."""
        if self.days:
            days = " to ".join(sorted({min(self.days), max(self.days)}))
            some = counted(len(self.days), "prediction")
            text = f"{some} recorded on {days}, by the same code and libraries; --fresh traces anew"
            self.console.print(text, style="dim", highlight=False)

    def line(self) -> Text:
        words = f"[{self.ended}/{self.count}] {self.why or 'predicting'}".rstrip(" :")
        return Text(f"{words}  {self.times()}  {self.last}", no_wrap=True, overflow="ellipsis")

    def rest_seconds(self) -> float | None:
        left = (self.count - self.ended) * self.seconds / self.ended if self.ended else 0.0
        return left or None


@contextlib.contextmanager
def during(progress: Predictions, *given: Any) -> Iterator[None]:
    progress.begin(*given)
    try:
        yield
    finally:
        progress.stop()


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def phase_words(status: dict[str, Any]) -> str:
    phase = status.get("phase")
    return RUN_PHASES.get(phase or "start", phase or "")


class Progress(LiveLine):
    """Progress of a suite: the current run, recipe, phase and step, the time taken and left."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.recipes: list[str] = []
        self.to_run: list[bool] = []
        self.done = 0
        self.last: dict[str, Any] = {}
        self.spent: list[float] = []
        self.measuring: tuple[float, int] | None = None
        self.recipe = ""

    def begin_suite(self, name: str, recipes: list[str], to_run: list[bool]) -> None:
        """Begin a suite of these runs. Those not ``to_run`` are finished or cannot run here."""
        self.recipes, self.to_run = recipes, to_run
        rows = f"{counted(len(recipes), 'run')}, {sum(to_run)} to do"
        self.console.print(Text.assemble("suite ", (name, "bold"), f": {rows}"))

    def begin_run(self, recipe: str, timeout: float | None) -> None:
        """Begin a row; ``timeout`` is its deadline in seconds."""
        self.recipe, self.last, self.measuring = recipe, {}, None
        self.start()
        if self.live is None:
            limit = f", at most {clock(timeout)}" if timeout else ""
            self.say(Text(f"{self._place()} {recipe}: begins{limit}{self.rest()}"))

    def status(self, status: dict[str, Any]) -> None:
        """Show a run's status: phase, step, of, loss (``launch.run``)."""
        self.last = status
        if status.get("phase") == "measure" and self.measuring is None:
            self.measuring = time.monotonic(), status.get("step") or 0
        if self.beat():
            text = f"{self._place()} {self.recipe}: {self._where()}  {clock(self.seconds)}"
            self.say(Text(text))

    def end_run(self, result: Result, name: str = "") -> None:
        """End the current row; ``name`` replaces its label."""
        seconds = self.seconds
        if result.status in ENDED:
            self.spent.append(seconds)
        self.stop()
        self._finished(result, f"  {clock(seconds)}", name)
        if result.launch and (others := result.launch.others):
            more = f" and {len(others) - 1} more" if others[1:] else ""
            text = f"another Headroom was at work meanwhile (process {others[0]}{more}): "
            text += "measure again with --fresh"
            self.say(Text(f"{' ' * len(self._head())} {text}", style="yellow"))

    def skip(self, result: Result, name: str = "") -> None:
        """Show a row that does not run: finished, refused or unsupported. ``name``: its label."""
        not_run = result.status in (Status.REFUSED, Status.UNSUPPORTED)
        self._finished(result, "" if not_run else "  (from an earlier run)", name)

    def leave_out(self, recipe: str, status: Status) -> None:
        """Show a repetition that is not run because the row itself ended as ``status``."""
        self.done += 1
        words = f" {recipe}: not run, because its first run ended as {status.value}"
        self.say(Text.assemble((self._head(), "dim"), words))

    def line(self) -> Text:
        place, now = f"{self._place()} ", f"{self._where()}  {self.times()}  "
        given: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"}
        return Text.assemble((place, "dim"), now, (self.recipe, "bold"), **given)

    def rest_seconds(self) -> float | None:
        if not self.spent:  # from the timed steps
            begun, first = self.measuring or (0.0, 0)
            step, total = self.last.get("step") or 0, self.last.get("of") or 0
            timed = self.last.get("phase") == "measure" and step > first and len(self.recipes) == 1
            return (total - step) * (time.monotonic() - begun) / (step - first) if timed else None
        mean, spent = statistics.fmean(self.spent), self.seconds
        return max(0.0, mean - spent) + mean * sum(self.to_run[self.done + 1 :])

    def _finished(self, result: Result, after: str, name: str) -> None:
        self.done += 1
        status, reason = shown_status(result)
        words = status.value.replace("_", " ")
        numbers = summary(result) if status is Status.OK else (reason or "")
        head = self._head()
        width = max((len(name) for name in self.recipes if len(name) <= NAME), default=0)
        first = Text.assemble((head, "dim"), f" {name or label(result.spec):<{width}}")
        rest = Text.assemble((words, STYLES.get(status, "yellow")), f"  {numbers}", (after, "dim"))
        narrow = self.console.is_terminal and len(first) + 2 + len(rest) > self.console.width
        gap = f"\n{' ' * len(head)} " if narrow else "  "
        self.say(Text(gap).join([first, rest]))
        if status is not Status.OK and result.way_out:
            self.say(Text(f"{' ' * len(head)} -> {result.way_out}", style="dim"))

    def _head(self) -> str:
        return f"[{self.done:>{len(str(len(self.recipes)))}}/{len(self.recipes)}]"

    def _place(self) -> str:
        return f"[{self.done + 1}/{len(self.recipes)}]"

    def _where(self) -> str:
        step, total = (self.last.get(key) for key in ("step", "of"))
        loss = self.last.get("loss")
        words = phase_words(self.last) + (f" {step}/{total}" if total else "")
        return words + (f"  loss {loss:.4f}" if loss is not None else "")


def summary(result: Result) -> str:
    """Return the median step time and the peak, or the resident mark, of an ok row."""
    seconds, size, name = derive.step_seconds(result), derive.peak_of(result.ranks), "peak"
    if size is None:
        size, name = derive.resident_bytes(result.ranks), "resident"
    parts = [f"{1000 * derive.quantile(seconds, 0.5):7.1f} ms a step"] if seconds else []
    return "  ".join([*parts, f"{size / 2**30:.2f} GiB {name}"] if size is not None else parts)


def clock(seconds: float) -> str:
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"

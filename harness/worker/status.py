"""Status files of a running worker: phase, step, peak so far, and its error.

Each rank has one small file, replaced atomically. The launching process shows progress from it, and
reports where a killed run was and how much memory it used.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.json_files import write_json
from strategies.base import BadInput

SECONDS_BETWEEN = 0.2


class Reporter:
    """Writes the status of rank ``rank`` below ``folder``, on its own machine. ``peak`` returns the
    peak bytes so far."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.own, self.folder, self.rank = folder, folder / "ranks", rank
        self.phase, self.step, self.of = "start", 0, 0
        self.peak: Callable[[], int] = lambda: 0
        self.phase_seconds: dict[str, float] = {}
        self._since = self._written = time.perf_counter()

    def enter(self, phase: str, of: int = 0) -> None:
        """Begin a phase of the run (``harness.phases.RUN_PHASES``) that has ``of`` steps. Add the
        seconds of the previous phase to its total."""
        now = time.perf_counter()
        seconds = self.phase_seconds.get(self.phase, 0.0)
        self.phase_seconds[self.phase] = seconds + now - self._since
        self.phase, self.step, self.of, self._since = phase, 0, of, now
        self._write()

    def at(self, step: int, **more: float) -> None:
        """Report ``step`` finished steps of this phase; files are written a few times a second at
        most."""
        self.step = step
        if step == self.of or time.perf_counter() - self._written > SECONDS_BETWEEN:
            self._write(**more)

    def failed(self, error: BaseException) -> dict[str, Any]:
        """Record the exception that ends this rank, and return the record."""
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        failure = {"type": type(error).__name__, "message": str(error), "traceback": "".join(lines)}
        if isinstance(error, BadInput):
            failure |= {"message": error.reason.text, "hint": error.reason.hint}
        record = {**self._facts(), **failure}
        write_json(self.folder / f"rank{self.rank}.failure.json", record)
        return record

    def _write(self, **more: float) -> None:
        self._written = time.perf_counter()
        facts = {**self._facts(), "pid": os.getpid(), "of": self.of, "time": time.time(), **more}
        write_json(self.folder / f"rank{self.rank}.status.json", facts, durable=False)

    def _facts(self) -> dict[str, object]:
        try:
            peak = self.peak()
        except RuntimeError:  # a device in an error state cannot be read
            peak = 0
        return {"rank": self.rank, "phase": self.phase, "step": self.step, "peak_bytes": peak}

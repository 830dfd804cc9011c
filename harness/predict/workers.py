"""The process beside this one that predicts (``harness.predict.worker``), as its parent sees it: it
is told of request after request, and tells which rows are done. No torch here."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from harness import ROOT
from harness.launch import command

__all__ = ["DONE", "Worker", "standing", "worker"]

DONE = "done"
"""What a worker says behind the rows of a request."""


class Worker:
    """A process that predicts. ``reason`` and ``fault`` say why it ended early, or never began."""

    def __init__(self) -> None:
        self.reason = self.fault = ""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by end)
        asked, ask = os.pipe()
        heard, told = os.pipe()
        self._ask, self._heard = open(ask, "w", buffering=1), open(heard)  # noqa: SIM115
        self._process = self._start(asked, told)

    @property
    def runs(self) -> bool:
        """Whether it can be asked."""
        return self._process is not None

    def ask(self, file: Path) -> Iterator[int]:
        """The index of each row of the request in ``file``, as it is written. Whoever does not hear
        the last ends the worker."""
        if self._process is None:
            return
        heard = False
        try:
            with contextlib.suppress(BrokenPipeError):  # it has died: said below
                print(file, file=self._ask)
            for line in self._heard:
                heard = line.strip() == DONE
                if heard:
                    return
                yield int(line)
            self._died(self._process.wait())
        finally:
            if not heard:
                self.end()

    def end(self) -> None:
        """End it, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for file in (self._ask, self._heard, self._log):
            with contextlib.suppress(BrokenPipeError):
                file.close()

    def _died(self, code: int) -> None:
        self._log.seek(0)
        lines = (line.strip() for line in reversed(self._log.read().splitlines()))
        self.reason = f"its worker ended with exit code {code}"
        self.fault = next(filter(None, lines), "")[:200]

    def _start(self, asked: int, told: int) -> subprocess.Popen[bytes] | None:
        words = [sys.executable, "-m", "harness.predict.worker", str(asked), str(told)]
        env = command.inherited() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": self._log}
        try:
            return subprocess.Popen(words, cwd=ROOT, env=env, pass_fds=[asked, told], **streams)
        except OSError as error:
            self.reason, self.fault = "its worker could not be started", str(error)
            return None
        finally:
            os.close(asked)
            os.close(told)


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


# ---- one for many requests ----

_STANDING: ContextVar[list[Worker] | None] = ContextVar("standing", default=None)


@contextlib.contextmanager
def standing() -> Iterator[None]:
    """While it lasts one worker is asked all, so that libraries are loaded once; where it dies, the
    next request starts another."""
    started: list[Worker] = []
    token = _STANDING.set(started)
    try:
        yield
    finally:
        _STANDING.reset(token)
        for one in started:
            one.end()


@contextlib.contextmanager
def worker() -> Iterator[Worker]:
    """The worker that stands, or one for this request alone."""
    started = _STANDING.get()
    if started is None:
        with standing(), worker() as own:
            yield own
        return
    if not started or not started[-1].runs:
        started.append(Worker())
    yield started[-1]

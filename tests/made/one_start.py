"""One start by accelerate for all launched runs of a session of tests, and for the predictions that
it makes: ``tests.children.several``, which forks for each.

A start imports torch, DeepSpeed and the library of models, some ten seconds of a core. What runs in
the forks is the real worker, with the words, variables and launch files that it has otherwise; that
the harness starts it so is for the tests of launching to see.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from harness import ROOT
from harness.planner import pool
from harness.planner.export import settled

GRACE_SECONDS = 10.0
MODULE = "tests.children.several"
POPEN, EXECUTABLE = subprocess.Popen, sys.executable


class Start:
    """The process that forks, begun by the command ``line`` makes for a folder's words."""

    def __init__(self, line: Callable[[Path, tuple[str, ...]], list[str]], env: dict[str, str]):
        self.folder = tempfile.TemporaryDirectory(prefix="headroom-tests-")
        place = Path(self.folder.name)
        self.log, answers = place / "log", place / "answers"
        os.mkfifo(answers)
        self._answers = os.open(answers, os.O_RDONLY | os.O_NONBLOCK)
        self._text = b""
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                line(place, ("--several", str(answers))),
                cwd=ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that all of it can be ended
            )
        self._finalizer = weakref.finalize(self, self._end, self.process, self._answers)

    def ask(self, asked: dict[str, Any], seconds: float) -> int:
        """The answer to one line.

        Raises:
            RuntimeError: there is none within ``seconds``, or ever; with the end of the log. The
                processes are ended.
        """
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(asked).encode() + b"\n")
            self.process.stdin.flush()
        limit = time.monotonic() + seconds
        while b"\n" not in self._text:
            if self.process.poll() is not None or time.monotonic() > limit:
                tail = self.tail()
                self.close()
                raise RuntimeError(f"no answer\n{tail}")
            if select.select([self._answers], [], [], 1.0)[0]:
                self._text += os.read(self._answers, 4096)
        first, _, self._text = self._text.partition(b"\n")
        return int(first)

    def tail(self, since: int = 0) -> str:
        """The end of what was printed after that many bytes."""
        return self.log.read_bytes()[since:][-4000:].decode(errors="replace")

    def close(self) -> None:
        """End it, and all that it forked."""
        self._finalizer()
        self.folder.cleanup()

    @staticmethod
    def _end(process: subprocess.Popen[bytes], answers: int) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            process.stdin.close()  # at which it ends
            process.wait(timeout=GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(answers)


class Program:
    """A program in a fork of ``start``, as ``subprocess.Popen`` is of a process."""

    def __init__(
        self, start: Start, words: Sequence[str], env: dict[str, str], files: dict[str, str]
    ) -> None:
        self.start, self.code = start, None
        asked = {"program": words[0], "words": list(words[1:]), "env": env, "open": files}
        self.pid = start.ask(asked, seconds=120)
        assert self.pid > 0, start.tail()

    def wait(self) -> int:
        if self.code is None:
            self.code = self.start.ask({"wait": self.pid}, seconds=600)
        return self.code

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)


STARTED: list[Start] = []


def running(begin: Callable[[], Start]) -> Start:
    """The one of this process, which ends with ``predictions_in_forks``; begun anew where it was
    lost."""
    if not STARTED or STARTED[-1].process.poll() is not None:
        STARTED.append(begin())
    return STARTED[-1]


@contextlib.contextmanager
def predictions_in_forks(begin: Callable[[], Start]) -> Iterator[None]:
    """Predictions are made by the worker of ``harness.planner.pool``, in a fork of the start,
    and an export's sizes counted in one; by a process of its own where a test has changed what
    would be started."""

    def started(words: Sequence[str], **how: Any) -> Any:
        if words[:2] != [EXECUTABLE, "-m"] or subprocess.Popen is not POPEN:
            return subprocess.Popen(words, **how)
        module, *ends = words[2:]
        files = {name: f"/proc/{os.getpid()}/fd/{name}" for name in ends}
        files |= {"log": f"/proc/{os.getpid()}/fd/{how['stderr'].fileno()}"}
        return Program(running(begin), [module, *ends], how["env"], files)

    def ended(words: Sequence[str], **how: Any) -> Any:
        if words[:2] != [EXECUTABLE, "-m"] or subprocess.Popen is not POPEN:
            return subprocess.run(words, **how)
        with tempfile.NamedTemporaryFile("r") as log:
            program = Program(running(begin), words[2:], how["env"], {"log": log.name})
            code, said = program.wait(), log.read()
        # Warnings are in the same file.
        text = "".join(line for line in said.splitlines(True) if line.startswith("{"))
        return subprocess.CompletedProcess(words, code, text, said)

    beside = SimpleNamespace(**vars(subprocess) | {"Popen": started})
    at_once = SimpleNamespace(**vars(subprocess) | {"run": ended})
    try:
        with (
            mock.patch.object(pool, "subprocess", beside),
            mock.patch.object(settled, "subprocess", at_once),
        ):
            yield
    finally:
        while STARTED:
            STARTED.pop().close()

"""Run one command as a child, and clean up its whole process tree.

Every process of the tree and its shared memory are removed after any end of the run: its own, the
deadline, Ctrl-C, SIGTERM, even a SIGKILL of this process or of the guard.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.system.guard import PR_SET_PDEATHSIG, SIGNALS
from harness.system.tree import Tree

TICK_SECONDS = 0.3
GRACE_SECONDS = 10.0
"""Seconds between a request to end and the kill."""
GUARD_SECONDS = 30.0
"""Seconds that a guard has to clean up."""
LINGER_SECONDS = 30.0
"""Seconds that a child has to end by itself once its work is done."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """End of a child. ``exit_code`` is None if a signal ended it, which ``signal`` names.

    ``stopped`` is why the harness ended it: "timeout", "interrupted", "lingered" (its work was done
    or had failed, but it did not end), another word of ``stop``, or None. ``tree_peak_bytes`` is
    the peak resident memory, summed over the tree. ``others`` are processes of another Headroom
    that ran meanwhile.
    """

    exit_code: int | None
    signal: int | None
    wall_seconds: float
    stopped: str | None
    tree_peak_bytes: int
    tree_processes: int
    others: tuple[int, ...] = ()


class CannotStart(OSError):
    """The command or its log cannot be opened; nothing was started."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP arrived while a child ran; raised after its tree has ended."""

    def __init__(self, number: int, ended: Ended) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number, self.ended = number, ended


def run_child(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    log: Path,
    timeout: float | None = None,
    on_tick: Callable[[int], None] = lambda resident_bytes: None,
    finished: Callable[[], bool] = lambda: False,
    stop: Callable[[], str | None] = lambda: None,
    scratch: Sequence[Path] = (),
) -> Ended:
    """Run ``argv`` to its end, with stdout and stderr in ``log``; times are in seconds.

    A few times a second ``on_tick`` gets the tree's resident bytes, and ``stop`` may return a word
    for ``Ended.stopped`` to end the child. Once ``finished()`` is true, the child has
    LINGER_SECONDS to end by itself. ``scratch`` folders are removed, also if this process is
    killed.

    Raises:
        CannotStart: no such command, or ``log`` cannot be written.
        Interrupted: a signal came; the tree has ended.
    """
    started, finished_at = time.monotonic(), None
    with _catch_signals() as caught, closing(_Guard(argv, cwd, env, log, scratch)) as guard:
        tree, stopped = Tree(guard.pid), None
        try:
            while stopped is None:
                on_tick(tree.sample())
                guard.hears_of(tree.files)
                if guard.code(TICK_SECONDS) is not None:
                    break
                now = time.monotonic()
                if finished_at is None and finished():
                    finished_at = now
                if caught:
                    stopped = "interrupted"
                elif finished_at is not None and now - finished_at > LINGER_SECONDS:
                    stopped = "lingered"
                elif timeout is not None and now - started > timeout:
                    stopped = "timeout"
                else:
                    stopped = stop()
            if stopped is None:
                tree.wait(1.0)
        finally:
            tree.stop(GRACE_SECONDS, hurry=lambda: len(caught) > 1)
            guard.hears_of(tree.files)
            code = guard.code(1.0)  # None for a process stuck in the kernel
            if not guard.close():
                tree.remove_files(guard.scratch)
    number = -code if code is not None and code < 0 else None
    ended = Ended(
        exit_code=code if number is None else None,
        signal=number,
        wall_seconds=time.monotonic() - started,
        stopped=stopped,
        tree_peak_bytes=tree.peak_bytes,
        tree_processes=tree.processes_at_peak,
        others=tuple(sorted(tree.others)),
    )
    if caught:
        raise Interrupted(caught[0], ended)
    return ended


class _Guard:
    """The harness's end of a run's guard, which starts the command."""

    def __init__(
        self,
        argv: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        log: Path,
        scratch: Sequence[Path],
    ) -> None:
        self.scratch = [path for path in scratch if not os.path.lexists(path)]
        self._code: int | None = None
        self._sent: set[str] = set()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        try:
            with log.open("ab") as stream:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "harness.system.guard", str(stream.fileno())],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stream,
                    pass_fds=[stream.fileno()],
                    start_new_session=True,
                )
        except OSError as error:
            raise CannotStart(error.errno, error.strerror, str(error.filename)) from None
        self.pid = self._process.pid
        request = {"argv": list(map(os.fspath, argv)), "cwd": os.fspath(cwd), "env": dict(env)}
        self._tell({**request, "scratch": list(map(os.fspath, self.scratch))})

    def code(self, seconds: float) -> int | None:
        """Return the command's exit code once it has ended, or None after ``seconds``."""
        answers: Any = self._process.stdout
        if self._code is None and select.select([answers], [], [], seconds)[0]:
            # A guard that was killed says nothing, and its command got SIGTERM.
            said = json.loads(answers.readline() or f'{{"code": {-signal.SIGKILL}}}')
            if "error" in said:
                raise CannotStart(*said["error"])
            self._code = said["code"]
        return self._code

    def hears_of(self, files: set[str]) -> None:
        """Let the guard remove these files if this process is killed."""
        if files - self._sent:
            self._tell({"files": sorted(files - self._sent)})
            self._sent |= files

    def close(self) -> bool:
        """Let the guard clean up; return whether it did."""
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            done = self._process.wait(GUARD_SECONDS) == 0
        except subprocess.TimeoutExpired:  # a process stuck in the kernel
            self._process.kill()
            done = self._process.wait() == 0
        self._process.stdout.close()  # type: ignore[union-attr]
        return done

    def _tell(self, facts: Mapping[str, Any]) -> None:
        pipe: Any = self._process.stdin
        with suppress(BrokenPipeError):  # the guard was killed
            pipe.write(json.dumps(facts).encode() + b"\n")
            pipe.flush()


@contextmanager
def _catch_signals() -> Iterator[list[int]]:
    """Record signals instead of ending at once, so that they cannot interrupt the clean-up."""
    caught: list[int] = []
    before = {}
    # Only the main thread may set handlers; nohup ignores SIGHUP on purpose.
    for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, lambda n, _: caught.append(n))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


# ---- in a worker ----


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def own_tools_first() -> None:
    """Put this Python's own commands at the front of PATH.

    Two versions of ninja disagree on which of DeepSpeed's ops are up to date, and recompile them.
    """
    own, path = str(Path(sys.executable).parent), os.environ.get("PATH", "")
    if path.split(os.pathsep)[0] != own:
        os.environ["PATH"] = own + os.pathsep + path


def plain_architectures() -> None:
    """Remove the letters from TORCH_CUDA_ARCH_LIST (9.0a becomes 9.0) for this process.

    DeepSpeed 0.19.8 reads them as numbers when it builds an op, and async_io then fails.
    """
    if named := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(\d)[a-z]\b", r"\1", named)

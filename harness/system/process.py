"""Run one command as a child, and clean up its whole process tree.

The clean-up removes every process of the tree and all its shared memory segments. It follows any
end of the run: its own end, the deadline, Ctrl-C, SIGTERM, even a SIGKILL of this process.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.system.tree import MARK, Tree, remove

TICK_SECONDS = 0.3
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Ended:
    """End of a child. ``exit_code`` is None if a signal ended it, which ``signal`` names.

    ``stopped`` is why the harness ended it: "timeout", "interrupted", "lingered" (its work was done
    or had failed, but it did not end), another word of ``stop``, or None. ``left_behind`` counts
    processes that outlived the command and were ended; ``survivors`` counts those that SIGKILL did
    not end. ``tree_peak_bytes`` is the peak resident memory, summed over the tree. ``others`` are
    processes of another Headroom that ran meanwhile.
    """

    exit_code: int | None
    signal: int | None
    wall_seconds: float
    stopped: str | None
    tree_peak_bytes: int
    tree_processes: int
    left_behind: int
    survivors: int
    others: tuple[int, ...] = ()


GRACE_SECONDS = 10.0
"""Seconds between a request to end and the kill."""
LINGER_SECONDS = 30.0
"""Seconds that a child has to end by itself once its work is done."""


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

    Args:
        on_tick: gets the tree's resident bytes a few times a second.
        finished: returns whether the work is done or lost; the child then has LINGER_SECONDS to end
            by
            itself.
        stop: called a few times a second; returns a word for ``Ended.stopped`` to end the child at
            once, or None.
        scratch: folders to remove at the end, also if this process is killed.

    Raises:
        CannotStart: no such command, or ``log`` cannot be written.
        Interrupted: a signal came; the tree has ended.
    """
    mark, started = uuid.uuid4().hex, time.monotonic()
    tree = Tree(mark)
    with _catch_signals() as caught, _keeper(mark, scratch) as tell:
        child = _spawn(argv, cwd, {**env, MARK: _marks(mark)}, log)
        tree.adopt(child.pid)
        watch = _Watch(tree, child, on_tick, finished, stop, caught, tell)
        left = survivors = 0
        try:
            stopped = watch.until_end(timeout)
            left = 0 if stopped else tree.wait(1.0)
        finally:
            survivors = tree.stop(GRACE_SECONDS, hurry=lambda: len(caught) > 1)
            with suppress(subprocess.TimeoutExpired):  # a process stuck in the kernel
                child.wait(1.0)
            tree.remove_files()
            for folder in scratch:
                remove(str(folder))
    ended = Ended(
        **_exit(child.returncode),
        wall_seconds=time.monotonic() - started,
        stopped=stopped,
        tree_peak_bytes=tree.peak_bytes,
        tree_processes=tree.processes_at_peak,
        left_behind=left,
        survivors=survivors,
        others=tuple(sorted(tree.others)),
    )
    if caught:
        raise Interrupted(caught[0], ended)
    return ended


def _marks(mark: str) -> str:
    """Return this run's mark after that of an outer run, which must find processes of an inner
    one."""
    return ":".join(filter(None, (os.environ.get(MARK), mark)))


def _exit(code: int | None) -> dict[str, int | None]:
    if code is None or code >= 0:
        return {"exit_code": code, "signal": None}
    return {"exit_code": None, "signal": -code}


def _spawn(
    argv: Sequence[str], cwd: Path, env: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    try:
        with log.open("ab") as stream:
            return subprocess.Popen(
                argv,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_bound_to(os.getpid(), signal.SIGTERM),
            )
    except OSError as error:
        raise CannotStart(error.errno, error.strerror, str(error.filename or argv[0])) from None


@dataclass
class _Watch:
    """Loop that watches a running child."""

    tree: Tree
    child: subprocess.Popen[bytes]
    on_tick: Callable[[int], None]
    finished: Callable[[], bool]
    stop: Callable[[], str | None]
    caught: list[int]
    tell: Callable[[set[str]], None]

    def until_end(self, timeout: float | None) -> str | None:
        """Watch the child; return why it has to be stopped, or None when it ended by itself."""
        started, finished_at = time.monotonic(), None
        while True:
            self.on_tick(self.tree.sample())
            self.tell(self.tree.files)
            if self._ends_within(TICK_SECONDS):
                return None
            now = time.monotonic()
            if self.caught:
                return "interrupted"
            if finished_at is None and self.finished():
                finished_at = now
            if finished_at is not None and now - finished_at > LINGER_SECONDS:
                return "lingered"
            if timeout is not None and now - started > timeout:
                return "timeout"
            if why := self.stop():
                return why

    def _ends_within(self, seconds: float) -> bool:
        try:
            self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


@contextmanager
def _catch_signals() -> Iterator[list[int]]:
    """Record signals instead of ending at once, so that they cannot interrupt the clean-up."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {}
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
            before[number] = signal.signal(number, lambda n, _: caught.append(n))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _bound_to(parent: int, number: int) -> Callable[[], None]:
    """Return a function for the child between fork and exec: it requests signal ``number`` for the
    case that ``parent`` dies."""
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: no library may load after it

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return bind


@contextmanager
def exits_raise() -> Iterator[None]:
    """Let ``os._exit`` raise SystemExit in this process, whose code may be a user's.

    Otherwise a model that calls it ends a command in silence, with success if it says so. Forks
    still end at once.
    """
    owner, leave = os.getpid(), os._exit

    def stop(code: int) -> None:
        if os.getpid() != owner:
            leave(code)
        raise SystemExit(code)

    os._exit = stop  # type: ignore[assignment]  # it returns to nobody
    try:
        yield
    finally:
        os._exit = leave


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


SCRATCH = "headroom-scratch-"
YOUNG_SECONDS = 60.0
"""Seconds within which a new scratch folder may not be locked yet."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a temporary folder that is locked while in use.

    First remove folders of this user whose process was killed, which released their locks.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        with suppress(OSError):
            _remove_abandoned(path)
    with tempfile.TemporaryDirectory(prefix=SCRATCH) as name:
        handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(handle)


def _remove_abandoned(path: Path) -> None:
    """Remove an unlocked folder of this user.

    Raises:
        OSError: it is in use, a link, no folder, or another user's.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(handle)
        if found.st_uid != os.getuid() or time.time() - found.st_mtime < YOUNG_SECONDS:
            return
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(handle)


def own_tools_first() -> None:
    """Put this Python's own commands at the front of PATH: its ninja before the system's.

    DeepSpeed finds ninja on the PATH. Two versions of ninja disagree on which files are up to date,
    and each would recompile every op after the other.
    """
    own, path = str(Path(sys.executable).parent), os.environ.get("PATH", "")
    if path.split(os.pathsep)[0] != own:
        os.environ["PATH"] = own + os.pathsep + path


def plain_architectures() -> None:
    """Remove the letters from TORCH_CUDA_ARCH_LIST (9.0a becomes 9.0) for this process.

    DeepSpeed 0.19.8 reads them as numbers when it builds an op, and its async_io then fails with
    "invalid literal for int() with base 10: '0a'".
    """
    if named := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(\d)[a-z]\b", r"\1", named)


@contextmanager
def _keeper(mark: str, scratch: Sequence[Path]) -> Iterator[Callable[[set[str]], None]]:
    """Start a small process that ends the tree if this process is killed. Yield a function that
    sets the files that it then removes."""
    keeper: Any = subprocess.Popen(
        [sys.executable, "-m", "harness.system.process", mark],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    sent: set[str] = set()

    def tell(paths: set[str]) -> None:
        _send(keeper, sorted(paths - sent))
        sent.update(paths)

    tell({str(folder) for folder in scratch})
    try:
        yield tell
    finally:
        _send(keeper, ["done"])
        with suppress(BrokenPipeError):
            keeper.stdin.close()
        keeper.wait()


def _send(keeper: Any, lines: list[str]) -> None:
    with suppress(BrokenPipeError):  # the keeper was killed; the run continues without it
        for line in lines:
            keeper.stdin.write(line + "\n")
        keeper.stdin.flush()


def _keep(mark: str) -> None:
    """Keeper process: wait for the harness's end; without a last "done", end its tree."""
    tree = Tree(mark)
    lines = sys.stdin.read().splitlines()
    if lines and lines[-1] == "done":
        return
    tree.stop(grace_seconds=2.0)
    tree.files.update(path for path in lines if not os.path.isdir(path))
    tree.remove_files()
    for path in filter(os.path.isdir, lines):
        remove(path)


if __name__ == "__main__":
    _keep(sys.argv[1])

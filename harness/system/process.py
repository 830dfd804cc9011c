"""Run one command as a child, and clean up its whole process tree.

The clean-up removes every process of the tree and all its shared memory segments. It follows any
end of the run: its own end, the deadline, Ctrl-C and SIGTERM. If this process is killed, the kernel
sends SIGTERM to the child, and the next run in its folder removes its files.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.system.tree import Tree

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SIGNALS = tuple(  # Windows has no SIGHUP
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
TICK_SECONDS = 0.3


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
            by itself.
        stop: called a few times a second; returns a word for ``Ended.stopped`` to end the child at
            once, or None.
        scratch: folders to remove at the end, unless they were there before.

    Raises:
        CannotStart: no such command, or ``log`` cannot be written.
        Interrupted: a signal came; the tree has ended.
    """
    started = time.monotonic()
    scratch = [path for path in scratch if not os.path.lexists(path)]
    with _catch_signals() as caught:
        tree = Tree()
        child = _started(argv, cwd, env, log)
        tree.child = child.pid
        watch = _Watch(tree, child, on_tick, finished, stop, caught)
        left = survivors = 0
        try:
            stopped = watch.until_end(timeout)
            left = 0 if stopped else tree.wait(1.0)
        finally:
            survivors = tree.stop(GRACE_SECONDS, hurry=lambda: len(caught) > 1)
            tree.remove_files(scratch)
            with suppress(subprocess.TimeoutExpired):  # a process stuck in the kernel
                child.wait(1.0)
            _adopt_orphans(False)
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


def _started(
    argv: Sequence[str], cwd: Path, env: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start the command. Its orphans become this process's children, and it ends with this
    process."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()  # no library may load after the fork
    _adopt_orphans(True)

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    try:
        with log.open("ab") as stream:
            return subprocess.Popen(
                argv,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                preexec_fn=bind,
            )
    except OSError as error:
        name = os.fspath(error.filename or argv[0])
        raise CannotStart(error.errno, error.strerror, name) from None


def _adopt_orphans(yes: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def _exit(code: int | None) -> dict[str, int | None]:
    if code is None or code >= 0:
        return {"exit_code": code, "signal": None}
    return {"exit_code": None, "signal": -code}


@dataclass
class _Watch:
    """Loop that watches a running child."""

    tree: Tree
    child: subprocess.Popen[bytes]
    on_tick: Callable[[int], None]
    finished: Callable[[], bool]
    stop: Callable[[], str | None]
    caught: list[int]

    def until_end(self, timeout: float | None) -> str | None:
        """Watch the child; return why it has to be stopped, or None when it ended by itself."""
        started, finished_at = time.monotonic(), None
        while True:
            self.on_tick(self.tree.sample())
            with suppress(subprocess.TimeoutExpired):
                self.child.wait(TICK_SECONDS)
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
    import fcntl  # Windows has none, and plans from records there

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
    import fcntl

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

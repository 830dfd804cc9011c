"""Process tree below one process, and the files that it leaves behind.

psutil finds the tree by parents. A run's root is its guard (``harness.system.guard``), which adopts
orphans, so that every descendant stays below it. No other process is ever touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

SHM = Path("/dev/shm")
OWNED = re.compile(r"^(?:torch_|__KMP_REGISTERED_LIB_)(\d+)_")
COMPILERS = frozenset(("sh", "ninja", "c++", "g++", "gcc", "cc1", "cc1plus", "as", "ld"))
COMPILERS |= {"collect2", "clang", "clang++", "nvcc", "cicc", "ptxas", "fatbinary", "cudafe++"}
TRIES = 10  # lookups of a new file's holder before it counts as another program's
WORKERS = ("harness.train", "harness.planner.worker")
"""Words that only the command line of a running Headroom has."""
KILL_SECONDS = 10.0
STALE_SECONDS = 600.0  # longer than any extension takes to compile


class Tree:
    """Descendants of the process ``root``, without itself.

    ``files`` are the shared memory segments and compile locks that they held open at some time;
    ``others`` are processes of another Headroom that ran meanwhile.
    """

    def __init__(self, root: int) -> None:
        self.root = psutil.Process(root)
        self.files: set[str] = set()
        self.others: set[int] = set()
        self.peak_bytes = self.processes_at_peak = 0
        self._members: set[psutil.Process] = set()
        self._pids: set[int] = set()
        self._seen: set[int] = set()
        self._before = _shared_files()
        self._tries: Counter[str] = Counter()

    def alive(self) -> list[psutil.Process]:
        """Return every living process of the tree, also after the root was killed."""
        found = set(self._members)
        # Only a root that was killed leaves processes that are not below it.
        for top in [self.root] if _lives(self.root) else [*found]:
            with contextlib.suppress(psutil.Error):
                found.update(top.children(recursive=True))
        self._members = {process for process in found if _lives(process)}
        self._pids |= {process.pid for process in found}
        return [*self._members]

    def sample(self) -> int:
        """Return the resident bytes summed over the tree; shared pages count once per process.

        Compilers are left out: DeepSpeed's ops, built in a first run, do not belong to the recipe.
        """
        present, alive, sizes = set(psutil.pids()), self.alive(), []
        for process in alive:
            with contextlib.suppress(psutil.Error):  # it is gone
                if process.name() not in COMPILERS:
                    sizes.append(process.memory_info().rss)
        if sum(sizes) > self.peak_bytes:
            self.peak_bytes, self.processes_at_peak = sum(sizes), len(sizes)
        self._note_files(alive)
        strangers = present - self._seen - self._pids - {os.getpid(), self.root.pid}
        self.others |= {pid for pid in strangers if _at_work(pid)}
        self._seen |= present
        return sum(sizes)

    def wait(self, seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Give processes time to exit, until ``hurry()``."""
        deadline = time.monotonic() + seconds
        while self.alive() and time.monotonic() < deadline and not hurry():
            time.sleep(0.05)

    def stop(self, grace_seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Send SIGTERM to all, and SIGKILL to the rest after the grace or once ``hurry()`` is true.

        A process stuck in the kernel outlives it.
        """
        self._note_files(self.alive())
        self._signal(signal.SIGTERM)
        self.wait(grace_seconds, hurry)
        deadline = time.monotonic() + KILL_SECONDS
        while self._signal(signal.SIGKILL) and time.monotonic() < deadline:
            time.sleep(0.02)

    def remove_files(self, scratch: Sequence[Path] = ()) -> None:
        """Remove the tree's shared memory segments and compile locks, and ``scratch`` folders."""
        self._note_files([])
        for path in self.files:
            # Another process may have taken a lock that the tree released.
            if not _held(path):
                with contextlib.suppress(OSError):
                    os.unlink(path)
        for folder in scratch:
            shutil.rmtree(folder, ignore_errors=True)  # it follows no link

    def _signal(self, number: int) -> int:
        alive = self.alive()
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        return len(alive)

    def _note_files(self, alive: Sequence[psutil.Process]) -> None:
        """Record new files that are named after the tree's processes, or that they hold."""
        new = _shared_files() - self._before - self.files
        for path in new:
            named = OWNED.match(os.path.basename(path))
            if named and int(named[1]) in self._pids:
                self.files.add(path)
        # Reading memory maps is slow: a file that none of them holds is another program's.
        unknown = {path for path in new - self.files if self._tries[path] < TRIES}
        for process in alive if unknown else ():
            self.files |= unknown & _opened(process.pid)
        self._tries.update(unknown)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def at_work() -> list[int]:
    """Return the processes of any Headroom, of any user, that measure or predict now."""
    return sorted(pid for pid in psutil.pids() if pid != os.getpid() and _at_work(pid))


def _at_work(pid: int) -> bool:
    try:
        return not set(WORKERS).isdisjoint(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


# ---- shared memory and compile locks ----


def _shared_files() -> frozenset[str]:
    segments = os.listdir(SHM) if SHM.is_dir() else []
    return frozenset((*(str(SHM / name) for name in segments), *map(str, compile_locks())))


def compile_locks() -> list[Path]:
    """Return torch's locks on extensions that are compiled, or whose compiler was killed."""
    root = Path(extensions_folder())
    return [*root.glob("*/lock"), *root.glob("*/*/lock")]


def extensions_folder() -> str:
    """Return the folder in which torch compiles extensions such as DeepSpeed's ops."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")


def free_stale_locks() -> list[Path]:
    """Remove compile locks without a holder, and return them: a run would wait for them for ever.

    The holder may run in another container or machine with the same home: so the age counts too.
    """
    freed = []
    for path in compile_locks():
        with contextlib.suppress(OSError):
            old = time.time() - path.stat().st_mtime > STALE_SECONDS
            if old and not _held(str(path)):
                path.unlink()
                freed.append(path)
    return freed


def awaited() -> str:
    """Return what is compiled now and its lock, or a lock that nobody here holds; else empty."""
    free_stale_locks()
    path = next(iter(compile_locks()), None)
    if path and _held(str(path)):
        return f"compiling {path.parent.name}, usually less than 2 min (lock: {path})"
    wait = f"waiting for {path}, a lock of a compiler that does not run here. It is removed when "
    wait += f"it is {STALE_SECONDS / 60:.0f} min old. If none runs elsewhere: stop this, rm {path}"
    return wait if path else ""


def _held(path: str) -> bool:
    return any(path in _opened(pid) for pid in psutil.pids())


def _opened(pid: int) -> set[str]:
    """Return the paths that a process has open or mapped; empty if it is gone or another user's."""
    folder, paths = f"/proc/{pid}/fd", set()
    try:
        names = os.listdir(folder)
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    for name in names:
        with contextlib.suppress(OSError):  # closed since it was listed
            paths.add(os.readlink(os.path.join(folder, name)))
    return paths | {line.split(None, 5)[5] for line in maps.splitlines() if " /" in line}

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

    ``files`` are the shared memory segments and compile locks that they held open at some time.
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
        self._before = _new_files(frozenset())
        self._tries: dict[str, int] = {}

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

        Compilers are left out: DeepSpeed builds its ops in the first run on a machine, and those
        gigabytes do not belong to the recipe.
        """
        present = set(psutil.pids())
        alive = self.alive()
        sizes = []
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

    def stop(self, grace_seconds: float, hurry: Callable[[], bool] = lambda: False) -> int:
        """Send SIGTERM to all, then SIGKILL to the rest after the grace, or once ``hurry()`` is
        true.

        Return the number still alive after that: 0 except for processes stuck in the kernel.
        """
        self._note_files(self.alive())
        deadline = time.monotonic() + grace_seconds
        self._signal(signal.SIGTERM)
        while self.alive() and time.monotonic() < deadline and not hurry():
            time.sleep(0.05)
        deadline = time.monotonic() + KILL_SECONDS
        while self._signal(signal.SIGKILL) and time.monotonic() < deadline:
            time.sleep(0.02)
        return len(self.alive())

    def wait(self, seconds: float) -> int:
        """Give ending processes time to exit; return how many remain."""
        deadline = time.monotonic() + seconds
        while (left := len(self.alive())) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def remove_files(self, scratch: Sequence[Path] = ()) -> None:
        """Remove the tree's shared memory segments and compile locks, and ``scratch`` folders."""
        self.files |= {path for path in _new_files(self._before) if self._named_after_us(path)}
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

    def _named_after_us(self, path: str) -> bool:
        named = OWNED.match(os.path.basename(path))
        return named is not None and int(named[1]) in self._pids

    def _note_files(self, alive: Sequence[psutil.Process]) -> None:
        """Record new files that the tree's processes hold.

        Reading memory maps is slow, so a file that none of them holds is looked up only ``TRIES``
        times.
        """
        new = {p for p in _new_files(self._before) if self._tries.get(p, 0) < TRIES} - self.files
        self.files |= {path for path in new if self._named_after_us(path)}
        if not new - self.files:
            return
        for process in alive:
            self.files |= new & _opened(process.pid)
        for path in new - self.files:
            self._tries[path] = self._tries.get(path, 0) + 1


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
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    return any(module in words for module in WORKERS)


# ---- shared memory and compile locks ----


def _new_files(before: frozenset[str]) -> frozenset[str]:
    """Return the present shared memory segments and compile locks without ``before``."""
    try:
        segments = {str(SHM / name) for name in os.listdir(SHM)}
    except OSError:
        segments = set()
    return frozenset((segments | {str(p) for p in compile_locks()}) - before)


def compile_locks() -> list[Path]:
    """Return torch's locks on extensions under compilation. A killed compiler never removes its
    lock."""
    root = extensions_folder()
    return [*Path(root).glob("*/lock"), *Path(root).glob("*/*/lock")]


def extensions_folder() -> str:
    """Return the folder in which torch compiles extensions such as DeepSpeed's ops."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not root:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        root = os.path.join(cache, "torch_extensions")
    return root


def free_stale_locks() -> list[Path]:
    """Remove compile locks without a holder, and return them.

    A killed compiler leaves its lock, and every later run waits for it for ever. torch keeps the
    lock open while it compiles, so a lock that no process has open is stale. Its age is checked
    too, because the holder may run in another container or on another machine with the same home.
    """
    freed = []
    for path in compile_locks():
        try:
            old = time.time() - path.stat().st_mtime > STALE_SECONDS
        except OSError:
            continue
        if old and not _held(str(path)):
            path.unlink(missing_ok=True)
            freed.append(path)
    return freed


def awaited() -> str:
    """Return the op that is compiled now, and its lock; or a lock that nobody holds.

    Locks that became stale are removed, so that no wait is for ever. Empty if nothing is compiled.
    """
    free_stale_locks()
    for path in compile_locks():
        if _held(str(path)):
            return f"compiling {path.parent.name}, usually less than 2 min (lock: {path})"
        return (
            f"waiting for {path}, a lock of a compiler that does not run here. It is removed when "
            f"it is {STALE_SECONDS / 60:.0f} min old. If no other machine compiles: rm {path}"
        )
    return ""


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

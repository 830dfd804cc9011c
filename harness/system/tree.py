"""Process tree found by a mark in the environment, and the files that it left behind.

Every descendant inherits the mark, even a process that forked away and was re-parented to init. A
process without the mark and without a marked ancestor is never touched, even if its name matches.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MARK = "HEADROOM_RUN"
SHM = Path("/dev/shm")
PAGE = os.sysconf("SC_PAGE_SIZE")
OWNED = re.compile(r"^(?:torch_|__KMP_REGISTERED_LIB_)(\d+)_")
KERNEL = 2  # the parent of the kernel's threads
COMPILERS = frozenset(("sh", "ninja", "c++", "g++", "gcc", "cc1", "cc1plus", "as", "ld"))
COMPILERS |= {"collect2", "clang", "clang++", "nvcc", "cicc", "ptxas", "fatbinary", "cudafe++"}
TRIES = 10  # lookups of a new file's holder before it counts as another program's
WORKERS = (b"harness.train", b"harness.planner.worker")
"""Words that only the command line of a running Headroom has."""
KILL_SECONDS = 10.0
STALE_SECONDS = 600.0  # longer than any extension takes to compile


class Process(NamedTuple):
    """One line of /proc; ``started`` (clock ticks since boot) distinguishes a reused pid."""

    name: str
    parent: int
    started: int
    resident_bytes: int
    alive: bool


class Tree:
    """Processes that carry ``mark`` or descend from one that does.

    ``files`` are the shared memory segments and compile locks that they held open at some time.
    ``others`` are processes of another Headroom that ran meanwhile.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark.encode()
        self.members: dict[int, int] = {}
        self.files: set[str] = set()
        self.others: set[int] = set()
        self.peak_bytes = 0
        self.processes_at_peak = 0
        self._strangers: dict[int, int] = {}
        self._before = _new_files(frozenset())
        self._tries: dict[str, int] = {}

    def adopt(self, pid: int) -> None:
        """Add a child, even one that clears its environment at once."""
        process = _process(str(pid))
        if process:
            self.members[pid] = process.started

    def alive(self) -> dict[int, Process]:
        """Return every living process of the tree."""
        table = _table()
        ours = {pid for pid, process in table.items() if self._belongs(pid, process)}
        while grown := {p for p, process in table.items() if process.parent in ours} - ours:
            ours |= grown
        self.members.update({pid: table[pid].started for pid in ours})
        return {pid: table[pid] for pid in ours if table[pid].alive}

    def sample(self) -> int:
        """Return the resident bytes summed over the tree; shared pages count once per process.

        Compilers are left out: DeepSpeed builds its ops in the first run on a machine, and those
        gigabytes do not belong to the recipe.
        """
        alive = self.alive()
        sizes = [p.resident_bytes for p in alive.values() if p.name not in COMPILERS]
        if sum(sizes) > self.peak_bytes:
            self.peak_bytes, self.processes_at_peak = sum(sizes), len(sizes)
        self._note_files(alive)
        return sum(sizes)

    def stop(self, grace_seconds: float, hurry: Callable[[], bool] = lambda: False) -> int:
        """Send SIGTERM to all, then SIGKILL to the rest after the grace, or once ``hurry()`` is
        true.

        Return the number still alive after that: 0 except for processes stuck in the kernel.
        """
        self.sample()
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

    def remove_files(self) -> None:
        """Remove the tree's shared memory segments and compile locks."""
        self.files |= {path for path in _new_files(self._before) if self._named_after_us(path)}
        for path in self.files:
            # Another process may have taken a lock that the tree released.
            if os.path.exists(path) and not _held(path):
                remove(path)

    def _belongs(self, pid: int, process: Process) -> bool:
        if self.members.get(pid) == process.started:
            return True
        if self._strangers.get(pid) == process.started:
            return False
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except PermissionError:  # another user's
            self._estrange(pid, process)
            return False
        except OSError:  # gone
            return False
        # The environment is empty in the middle of exec (read again), and for the kernel's threads.
        if self.mark not in environment and (environment or process.parent == KERNEL):
            self._estrange(pid, process)
        return self.mark in environment

    def _estrange(self, pid: int, process: Process) -> None:
        """Check a foreign process once, and not again."""
        self._strangers[pid] = process.started
        if process.alive and _at_work(pid):
            self.others.add(pid)

    def _signal(self, number: int) -> int:
        alive = self.alive()
        for pid in alive:
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue
        return len(alive)

    def _named_after_us(self, path: str) -> bool:
        named = OWNED.match(os.path.basename(path))
        return named is not None and int(named[1]) in self.members

    def _note_files(self, alive: dict[int, Process]) -> None:
        """Record new files that the tree's processes hold.

        Reading memory maps is slow, so a file that none of them holds is looked up only ``TRIES``
        times.
        """
        new = {p for p in _new_files(self._before) if self._tries.get(p, 0) < TRIES} - self.files
        self.files |= {path for path in new if self._named_after_us(path)}
        if not new - self.files:
            return
        for pid in alive:
            self.files |= new & _opened(pid)
        for path in new - self.files:
            self._tries[path] = self._tries.get(path, 0) + 1


def remove(path: str) -> None:
    """Delete a file or a folder; ignore one that is gone or may not be deleted."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        os.unlink(path)
    except OSError:
        return


def _table() -> dict[int, Process]:
    """Return every process except this one."""
    me, table = os.getpid(), {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != me:
            process = _process(name)
            if process:
                table[int(name)] = process
    return table


def at_work() -> list[int]:
    """Return the processes of any Headroom, of any user, that measure or predict now."""
    return sorted(pid for pid, process in _table().items() if process.alive and _at_work(pid))


def _at_work(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(module in words for module in WORKERS)


def _process(pid: str) -> Process | None:
    try:
        # The command's name, in brackets, may hold any text; the numbers follow the last bracket.
        text, _, numbers = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
    except OSError:
        return None
    if not numbers:
        return None
    name = text.partition(b"(")[2].decode(errors="replace")
    state, parent, *words = numbers.split()
    alive = state not in (b"Z", b"X")
    return Process(name, int(parent), int(words[17]), int(words[19]) * PAGE, alive)


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
            remove(str(path))
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
    return any(path in _opened(pid) for pid, process in _table().items() if process.alive)


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

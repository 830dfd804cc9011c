"""Files of a user's that decide a row: recorded while code runs, compared before a row is kept.

``sys.addaudithook`` reports each file that Python opens. Counted are source files outside of the
environment and of Headroom, and other files below the folders of the user's code or named on its
command line, except those that the run writes. What a library opens in C (safetensors, HDF5) is
counted if it is named on the command line.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from harness import ROOT

WHOLE_BYTES = 64 * 2**20
"""Size up to which a file counts by its content; a larger one by its size and time."""
MOST_FILES = 10_000
"""Number of files above which what decides a row is unknown."""
OWN = tuple(str(ROOT / name) + os.sep for name in ("harness", "strategies", "launch_configs"))
RECORD = "opened.txt"

Listener = Callable[[str, bool], None]
"""Gets a path, and whether the file is opened for writing."""
_listeners: list[Listener] = []


@functools.lru_cache(maxsize=1)
def _environment() -> tuple[str, ...]:
    """Return the folders of Python, of its packages and of the system."""
    names = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, *site.getsitepackages()}
    names |= {site.getusersitepackages(), "/proc", "/sys", "/dev"}
    prefixes = {os.path.abspath(name) for name in names} | {os.path.realpath(n) for n in names}
    return tuple(name.rstrip(os.sep) + os.sep for name in prefixes)


@functools.lru_cache(maxsize=1)
def _install() -> None:

    def hook(event: str, given: tuple[object, ...]) -> None:
        if event != "open" or not _listeners or isinstance(given[0], int):
            return
        with contextlib.suppress(TypeError, ValueError, OSError):
            path = os.path.abspath(os.fsdecode(given[0]))  # type: ignore[arg-type]
            flags = given[2] if isinstance(given[2], int) else 0
            for listener in list(_listeners):
                listener(path, flags & os.O_ACCMODE != os.O_RDONLY)

    sys.addaudithook(hook)


def _source(path: str) -> str:
    """Return the source of a compiled module; other paths as they are."""
    with contextlib.suppress(ValueError, NotImplementedError):
        if path.endswith(".pyc"):
            return importlib.util.source_from_cache(path)
    return path


def _decides(path: str, roots: Sequence[str], named: Iterable[str]) -> bool:
    """Return whether a file is a user's and may decide a row."""
    if path.startswith((*OWN, *_environment())):
        return False
    if path.endswith(".py") or path in named:
        return True
    root = next((root for root in roots if path.startswith(root.rstrip(os.sep) + os.sep)), None)
    return root is not None and not any(
        part.startswith((".", "__pycache__")) for part in Path(path[len(root) :]).parts
    )


def _listen(
    roots: Iterable[str], named: Iterable[str], tell: Callable[[str, bool], None]
) -> Listener:
    """From here on, tell each written path, and each read one that may decide a row, once."""
    below, seen = list(roots), set[tuple[str, bool]]()

    def note(path: str, writes: bool) -> None:
        path = _source(path)
        if (path, writes) not in seen and "\n" not in path:
            seen.add((path, writes))
            if writes or _decides(path, below, named):
                tell(path, writes)

    _install()
    _listeners.append(note)
    return note


def record(folder: Path, rank: int, roots: Iterable[Path], words: Iterable[str] = ()) -> None:
    """From here on, append what this process and its forks open to a file below ``folder``.

    Files and folders among the ``words`` of a command line count as named.
    """
    given = {os.path.abspath(part) for word in words for part in (word, word.partition("=")[2])
             if part and os.path.exists(part)}  # fmt: skip
    named = {path for path in given if os.path.isfile(path)}
    below = [*(os.path.abspath(root) for root in roots), *sorted(given - named)]
    target, here = folder / "ranks" / f"rank{rank}.{RECORD}", str(folder.absolute()) + os.sep
    target.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def tell(path: str, writes: bool) -> None:
        if not path.startswith(here):
            os.write(handle, f"{'w' if writes else 'r'} {path}\n".encode(errors="surrogateescape"))

    note = _listen(below, named, tell)
    for path in sorted(named):
        note(path, False)


@contextlib.contextmanager
def noted(found: set[str], roots: Iterable[Path]) -> Iterator[None]:
    """Add what decides the code in this context to ``found``, without what it writes."""
    written = set[str]()
    below = [os.path.abspath(root) for root in roots]
    note = _listen(below, (), lambda path, writes: (written if writes else found).add(path))
    try:
        yield
    finally:
        _listeners.remove(note)
        found -= written


# ---- in the launching process ----


def inputs(folder: Path, since: float) -> dict[str, str] | None:
    """Return the digest of each file that decided the run in ``folder``; None if it is unknown.

    It is unknown if nothing was recorded, or if a file changed after the start (``since``).
    """
    opened: dict[str, set[str]] = {"r": set(), "w": set()}
    records = list((folder / "ranks").glob(f"rank*.{RECORD}"))
    for file in records:
        for line in file.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            opened.get(line[:1], set()).add(line[2:])
    files = sorted(opened["r"] - opened["w"])
    if not records or len(files) > MOST_FILES:
        return None
    try:
        if any(os.stat(path).st_mtime > since for path in files):
            return None
        return {path.removeprefix(f"{ROOT}{os.sep}"): digest(path) for path in files}
    except OSError:
        return None


def unchanged(known: Mapping[str, str] | None) -> bool:
    """Return whether each file is as it was when ``inputs`` recorded it; False if unknown."""
    if known is None:
        return False
    try:
        return all(digest(ROOT / name) == found for name, found in known.items())
    except OSError:
        return False


def digest(path: Path | str) -> str:
    """Return a short hash of a file's content; of a large one, its size and time."""
    told = os.stat(path)
    if told.st_size > WHOLE_BYTES or not os.path.isfile(path):
        return f"{told.st_size}:{told.st_mtime_ns}"
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]

"""Output folders: which files are Headroom's, and the only way to replace or delete one.

A mark in each output folder lists the names that belong to Headroom there. A name is added only if
no such file exists; everything else stays as it is, unless ``--force`` is given. Symbolic links are
replaced or refused, and never followed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.json_files import BadFile, atomic_file, read_json, write_json
from strategies.base import BadInput

MARK = ".headroom.json"
"""Mark of a folder: name or pattern -> SHA-256 of the file's text, or "" for any content."""
REPORT = ("report.md", "report.csv", "report.json", "report.html")
RESULTS = ("runs", "suite.json", *REPORT)
"""Names in the folder of a suite."""
SIGNED = {
    "result.json": ("spec", "status"),
    "suite.json": ("reference", "order"),
    "anatomy.json": ("recipe", "timeline"),
    "calibration.json": ("device", "ceilings"),
    "runs/*/result.json": ("spec", "status"),
    "checkpoint/step-*/headroom.json": ("step", "files"),
    "step-*/headroom.json": ("step", "files"),
}
"""Files of versions that made no marks -> keys that identify them."""

HEADS = {
    ".md": b"# Headroom",
    ".html": b"<title>Headroom",
    ".csv": b"recipe,status,",
    ".json": b'"headroom-report-',
}
"""Text near the start of a report's files, also of versions that made no marks."""


LINKED = "{} is a symbolic link, which is not followed; remove it"
FOREIGN = "{} exists, and Headroom did not write it; move it, give another folder, or give --force "
FOREIGN += "to replace it"


class Taken(BadInput):
    """A file of somebody else would be replaced or deleted; names it and the remedy."""


class OutputError(OSError):
    """A run cannot start, or its folder cannot be used; one line with a remedy."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write within this context to ``path``; raise ``OutputError`` if it fails."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"cannot write to {path}: {why}; choose another --out") from None


def claim(folder: Path, names: Iterable[str], *, force: bool = False) -> None:
    """Create ``folder`` and mark ``names`` (``fnmatch`` patterns) there as Headroom's.

    Raises:
        Taken: a file of such a name exists and is not Headroom's, or is a link to a folder.
    """
    ours = _inside_of_ours(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if ours:
        return
    names, made = list(names), _mark(folder)
    new = [name for name in names if name not in made]
    for path in _named(folder, names):
        for link in (path, *(path.iterdir() if path.is_dir() else ())):
            if link.is_symlink() and link.is_dir():
                raise Taken(LINKED.format(link))
        if not force and _matches(path, new) and not _of_older_version(path):
            raise Taken(FOREIGN.format(path))
    if new:
        write_json(folder / MARK, made | dict.fromkeys(new, ""), durable=False)


def claim_file(path: Path, *, force: bool = False) -> None:
    """Claim one file, whose folder may hold anything (``claim``)."""
    if path.is_symlink():
        raise Taken(LINKED.format(path))
    claim(path.parent, [glob.escape(path.name)], force=force)


def clear(folder: Path, names: Iterable[str]) -> None:
    for path in _named(folder, names):
        remove(path)


def remove(path: Path | str) -> None:
    """Delete a file, a link or a folder if it exists; the target of a link stays."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)


def write_texts(folder: Path, texts: Mapping[str, str], *, force: bool = False) -> None:
    """Write ``texts`` (name -> text) to ``folder``, for files that users edit afterwards.

    Raises:
        Taken: a file is not as Headroom wrote it; then none is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = _mark(folder)
    for name, text in texts.items():
        path = folder / name
        if path.parent != folder or path.is_dir():
            raise Taken(f"{path} is no file in {folder}; give another folder")
        ours = {_digest(text), made.get(glob.escape(name))}
        regular = path.is_file() and not path.is_symlink()
        found = hashlib.sha256(path.read_bytes()).hexdigest() if regular else ""
        if os.path.lexists(path) and not force and found not in ours:
            raise Taken(FOREIGN.format(path))
    for name, text in texts.items():
        with atomic_file(folder / name) as stream:
            stream.write(text)
    written = {glob.escape(name): _digest(text) for name, text in texts.items()}
    write_json(folder / MARK, made | written, durable=False)


def _named(folder: Path, names: Iterable[str]) -> list[Path]:
    names = list(names)
    return sorted(path for path in folder.iterdir() if _matches(path, names))


def _matches(path: Path, names: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path.name, name) for name in names)


def _mark(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(BadFile):
        return read_json(folder / MARK, dict[str, Any])
    return {}


def _inside_of_ours(folder: Path) -> bool:
    """Return whether this folder lies within a claimed name of a marked folder above."""
    way = [folder, *folder.parents][:4]
    for depth, path in enumerate(way[:-1], start=1):
        if _matches(path, _mark(way[depth])):
            for link in filter(Path.is_symlink, way[:depth]):
                raise Taken(LINKED.format(link))
            return True
    return False


def _of_older_version(path: Path) -> bool:
    """Return whether an older version made ``path``: by a report's text, or what lies beside it."""
    if path.name in REPORT:
        if path.is_symlink() or not path.is_file():
            return False
        with path.open("rb") as file:
            return HEADS[path.suffix] in file.read(2000)
    for name, keys in SIGNED.items():
        for sibling in path.parent.glob(name):
            with contextlib.suppress(BadFile):
                if read_json(sibling, dict[str, Any]).keys() >= set(keys):
                    return True
    return False


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()

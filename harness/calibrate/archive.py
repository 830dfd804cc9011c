"""A session as one file to carry away: what was measured and how it ended, without its caches."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["FILE_BYTES", "pack", "packed"]

FILE_BYTES = 4 * 2**20
"""A larger file is a recording or a compiler's: it stays where it is."""
LEFT_OUT = ("compiled", "profile", "nvme", "ranks", "predictions")
"""Folders of a run that nothing is read from later; predictions lie beside the results too."""


def packed(folder: Path) -> Iterator[Path]:
    """The files of a session that are carried, in order."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        hidden = any(part in LEFT_OUT or part.startswith(".") for part in inside.parts)
        plain = path.is_file() and not path.is_symlink() and not hidden
        if plain and path.stat().st_size <= FILE_BYTES:
            yield path


def pack(folder: Path, target: Path) -> Path:
    """Write ``target``, a gzipped tar of the session below one folder of its name."""
    beside = target.with_name(f".{target.name}")
    with tarfile.open(beside, "w:gz") as tar:
        for path in packed(folder):
            tar.add(path, arcname=str(Path(folder.name) / path.relative_to(folder)))
    beside.replace(target)
    return target

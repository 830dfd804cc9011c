"""A launch's folder on a node's own disk: statuses, caches, swap files; and what dead ones left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from strategies.files import check_own_folder, lock_file

__all__ = ["own_folder"]

LOCK = ".alive"


@contextlib.contextmanager
def own_folder(token: str, rank: int) -> Iterator[Path]:
    """The folder, locked as long as this process lives, and removed at the end. HEADROOM_SCRATCH
    names a disk for it, as a fast NVMe.

    Folders of launches that a power cut or a scheduler's kill left here are removed first: the
    kernel lets go of a lock whatever its holder died of.
    """
    root = Path(os.environ.get("HEADROOM_SCRATCH") or tempfile.gettempdir())
    mine = f"headroom-{os.getuid()}"
    for old in root.glob(f"{mine}-{'[0-9a-f]' * 12}-*"):
        with contextlib.suppress(OSError):
            check_own_folder(old)
            with _locked(old):
                shutil.rmtree(old, ignore_errors=True)
    folder = root / f"{mine}-{token}-{rank}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_own_folder(folder)
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold ``folder``; raises OSError where another process does, or it is gone."""
    with lock_file(folder / LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield

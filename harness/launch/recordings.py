"""Where a recorded run leaves its files (``harness.worker.record`` writes them), and which ones."""

from __future__ import annotations

from pathlib import Path

__all__ = ["PROFILE", "history_file", "left_in"]

PROFILE = "profile"
"""The folder, below the run's, of a profiler's traces."""
HISTORY = "snapshot.rank{}.pickle"


def history_file(folder: Path, rank: int | str) -> Path:
    """The allocator's history of ``rank``."""
    return folder / HISTORY.format(rank)


def left_in(folder: Path) -> list[str]:
    """Files for other tools below a run's ``folder``, relative to it."""
    paths = [*folder.glob(f"{PROFILE}/*.json*"), *folder.glob(HISTORY.format("*"))]
    return sorted(str(path.relative_to(folder)) for path in paths)

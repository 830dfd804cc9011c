"""What a test's child waits for: that the tree it lives in was looked at."""

from __future__ import annotations

from pathlib import Path


class Looks:
    """An ``on_tick`` that touches ``folder/seen`` at the second look after ``folder/ready`` came.

    The first may have been taken just before what ``ready`` tells of.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.since_ready = folder, 0

    def __call__(self, resident_bytes: int) -> None:
        self.since_ready += (self.folder / "ready").exists()
        if self.since_ready == 2:
            (self.folder / "seen").touch()

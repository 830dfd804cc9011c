"""The sources that decide a number, as a hash: a change anywhere else leaves kept numbers valid.

Which sources those are follows from the rooms: what a worker runs lies in rooms of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from harness import ROOT

MEASURED = ("data", "launch", "memory", "sampling", "subjects", "worker")
"""Rooms of ``harness`` that a run executes, or that start it. ``system`` says what the machine is:
a result is keyed by its answers."""
PREDICTED = (*MEASURED, "planner")
FRONT = ("__main__.py", "cli.py", "extensions.py")
KINDS = (".py", ".yaml", ".json")


def digest(rooms: tuple[str, ...]) -> str:
    """A short hash of these rooms, of the files beside them, of strategies and launch files, as
    they are now: they may change between two rows."""
    hasher = hashlib.sha256()
    for path in sorted(_sources(rooms)):
        hasher.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return hasher.hexdigest()[:16]


def _sources(rooms: tuple[str, ...]) -> Iterator[Path]:
    folders = [ROOT / "strategies", ROOT / "launch_configs"]
    for folder in folders + [ROOT / "harness" / room for room in rooms]:
        yield from (path for path in folder.rglob("*") if path.suffix in KINDS)
    yield from (path for path in (ROOT / "harness").glob("*.py") if path.name not in FRONT)

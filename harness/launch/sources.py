"""Hash of the source files that decide a number: other changes leave stored numbers valid."""

from __future__ import annotations

import hashlib

from harness import ROOT

MEASURED = ("data", "launch", "memory", "sampling", "subjects", "worker")
"""Packages of ``harness`` that decide a run; of ``system`` its answers are in the key."""
FRONT = ("__main__.py", "api.py", "cli.py", "hooks.py")
"""The front door: files that start commands, and decide no number."""
KINDS = (".py", ".yaml", ".json")


def digest(rooms: tuple[str, ...]) -> str:
    """Return a short hash of these packages, the files beside them, strategies and launch files.

    It reads the files each time, because they may change between two rows.
    """
    hasher = hashlib.sha256()
    paths = [path for path in (ROOT / "harness").glob("*.py") if path.name not in FRONT]
    for folder in ("strategies", "launch_configs", *(f"harness/{room}" for room in rooms)):
        paths += (path for path in (ROOT / folder).rglob("*") if path.suffix in KINDS)
    for path in sorted(paths):
        hasher.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return hasher.hexdigest()[:16]

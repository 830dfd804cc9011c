"""Processes of a run that is going on: ranks that measure, and whatever of it still lives."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["left", "ranks", "until"]


def until(fact: Callable[[], object], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not fact() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert fact()


def ranks(out: Path, recipe: str = "ddp") -> dict[int, int]:
    """Rank -> pid, of the ranks of a row that is measuring."""
    found = {}
    for path in out.glob(f"runs/{recipe}-*/ranks/rank*.status.json"):
        try:
            facts = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if facts["phase"] == "measure":
            found[facts["rank"]] = facts["pid"]
    return found


def left(out: Path) -> list[str]:
    """Living processes that were told of the results folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes()
            alive = (path / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            continue
        if os.fsencode(out) in words and alive:
            found.append(path.name)
    return found

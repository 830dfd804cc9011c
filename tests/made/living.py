"""Processes of a run that is going on: ranks that measure, and whatever of it still lives."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def until(fact: Callable[[], object], seconds: float = 240.0, pause: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while not (found := fact()) and time.monotonic() < deadline:
        time.sleep(pause)
    assert found


def ranks(out: Path, recipe: str = "ddp") -> dict[int, int]:
    """Rank -> pid, of the ranks of a row that is measuring."""
    found = _statuses(out, recipe)
    return {one["rank"]: one["pid"] for one in found if one["phase"] == "measure"}


def phases(out: Path) -> list[str]:
    """The phase of each rank of the rows in ``out``."""
    return [one["phase"] for one in _statuses(out, "*")]


def _statuses(out: Path, recipe: str) -> Iterator[dict[str, Any]]:
    for path in out.glob(f"runs/{recipe}-*/ranks/rank*.status.json"):
        with contextlib.suppress(OSError, ValueError):
            yield json.loads(path.read_text())


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

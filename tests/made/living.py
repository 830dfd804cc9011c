"""Processes of a run that is going on: ranks that measure, and whatever of it still lives."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil


def until(
    fact: Callable[[], object],
    seconds: float = 240.0,
    pause: float = 0.1,
    children: Iterable[subprocess.Popen] = (),
    say: Callable[[], str] = str,
) -> None:
    """Wait until something holds, while ``children`` run; ``say`` explains a failure."""
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, f"waited in vain: {say()}"
        assert all(child.poll() is None for child in children), "ended early"
        time.sleep(pause)


def ranks(out: Path, recipe: str = "ddp") -> dict[int, int]:
    """Rank -> pid, of the ranks of a row that is measuring."""
    found = statuses(out, recipe)
    return {one["rank"]: one["pid"] for one in found if one["phase"] == "measure"}


def statuses(out: Path, recipe: str = "*") -> Iterator[dict[str, Any]]:
    for path in out.glob(f"runs/{recipe}-*/ranks/rank*.status.json"):
        with contextlib.suppress(OSError, ValueError):
            yield json.loads(path.read_text())


def left(out: Path) -> list[psutil.Process]:
    """Living processes that were told of the results folder."""
    told = psutil.process_iter(["cmdline", "status"])
    ours = [one for one in told if any(str(out) in word for word in one.info["cmdline"] or ())]
    return [one for one in ours if one.info["status"] != psutil.STATUS_ZOMBIE]


class Looks:
    """An ``on_tick`` that touches ``folder/seen`` at the second look after ``folder/ready`` came:
    the first may have been taken just before what ``ready`` tells of."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.since_ready = folder, 0

    def __call__(self, resident_bytes: int) -> None:
        self.since_ready += (self.folder / "ready").exists()
        if self.since_ready == 2:
            (self.folder / "seen").touch()

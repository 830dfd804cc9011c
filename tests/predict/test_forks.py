"""Functions in forks: what they return, how many at a time, and what is lost with one that dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

from harness.planner.tracing import forks
from harness.planner.tracing.forks import EARLY, in_forks


def test_each_answers_by_its_index_and_so_many_run_at_a_time(tmp_path: Path):
    def count(what: str) -> int:
        return len([*tmp_path.glob(f"{what}-*")])

    def function(index: int):
        def run() -> dict:
            (tmp_path / f"began-{index}").touch()
            there, end = count("began") - count("ended"), time.monotonic() + 30
            while count("began") < 2 and time.monotonic() < end:  # the first waits for the second
                time.sleep(0.01)
            time.sleep(0.05)  # a third would show
            both = count("began") >= 2
            (tmp_path / f"ended-{index}").touch()
            return {"ok": both and there <= 2, "pid": os.getpid(), "long": "x" * 3_000_000}

        return run

    found = {one.index: one.made for one in in_forks([function(i) for i in range(5)], 2, 60)}
    assert sorted(found) == list(range(5)) and all(made["ok"] for made in found.values())
    assert all(len(made["long"]) == 3_000_000 for made in found.values())
    assert len({made["pid"] for made in found.values()} | {os.getpid()}) == 6


def test_what_dies_or_never_ends_is_lost_alone(monkeypatch):
    def dies() -> dict:
        os._exit(3)

    def hangs() -> dict:
        while True:
            signal.pause()

    def raises() -> dict:
        raise ValueError("lost")

    found, limit = {}, 3600.0

    def clock() -> float:
        """The limit passes when all others have ended."""
        return time.monotonic() + limit * (len(found) == 3)

    monkeypatch.setattr(forks, "time", SimpleNamespace(monotonic=clock))
    for one in in_forks([dies, hangs, lambda: {"there": 1}, raises], 4, limit):
        found[one.index] = one.made
    assert found[0] == EARLY == found[3] and found[2] == {"there": 1}
    assert found[1] == {"why": "not done after 3600 s"}

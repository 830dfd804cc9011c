"""The search for the largest micro batch: its order, what it keeps, and real runs under a limit."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from conftest import TINY, launched
from rich.console import Console

from harness.commands.max_batch import Search, Unclear, search
from harness.commands.progress import Progress
from harness.result import Result, Status
from tests.made.machines import machine

MIB = 2**20


@pytest.mark.parametrize("first", [1, 3, 16, 100])
@pytest.mark.parametrize("largest", [0, 1, 7, 16, 63, 100])
def test_the_largest_that_fits_is_found_in_few_probes(first, largest):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= largest

    assert search(fits, first, most=100) == largest
    assert len(set(tried)) == len(tried) <= 14 and max(tried) <= 100
    neighbours = {largest, largest + 1} & set(range(1, 101))
    assert neighbours <= set(tried), "both sides of the answer were seen"


class Fake:
    """``launch.run`` for a machine that holds ``room`` samples."""

    def __init__(self, room: int, broken: int | None = None) -> None:
        self.room, self.broken, self.started = room, broken, []

    def __call__(self, resolved, folder, *, timeout, on_status, more) -> Result:
        self.started.append(resolved.micro_batch)
        status = Status.OK if resolved.micro_batch <= self.room else Status.HOST_OOM
        if resolved.micro_batch == self.broken:
            status = Status.FAILED
        folder.mkdir(parents=True, exist_ok=True)
        return Result(status=status, spec=resolved.spec, reason="as made", way_out="none")


def searching(folder, start, **fields) -> Search:
    spec = dataclasses.replace(TINY, recipe="ddp+accumulate:steps=2", processes=2)
    usual = {"limit_bytes": MIB, "timeout": None, "fresh": False, "progress": quiet()}
    return Search(
        spec=spec, out=folder, machine=machine(folder), start=start, **{**usual, **fields}
    )


def quiet() -> Progress:
    return Progress(Console(file=io.StringIO()))


def test_probes_are_recorded_and_taken_up_again(tmp_path):
    first = Fake(room=5)
    assert search(searching(tmp_path, first).fits, 1, 100) == 5
    kept = json.loads((tmp_path / "max_batch.json").read_text())
    ends = {p["micro_batch"]: p["status"] for p in kept["probes"]}
    assert ends == {1: "ok", 2: "ok", 4: "ok", 5: "ok", 6: "host_oom", 8: "host_oom"}
    assert {p["global_batch"] // p["micro_batch"] for p in kept["probes"]} == {4}
    again = Fake(room=5)
    assert search(searching(tmp_path, again).fits, 1, 100) == 5 and again.started == []
    other = Fake(room=9)
    assert search(searching(tmp_path, other, limit_bytes=2 * MIB).fits, 1, 100) == 9
    assert other.started[0] == 1, "another limit is another question"


def test_a_probe_that_fails_otherwise_ends_the_search(tmp_path):
    start = Fake(room=50, broken=4)
    with pytest.raises(Unclear, match="as made"):
        search(searching(tmp_path, start).fits, 1, 100)
    kept = json.loads((tmp_path / "max_batch.json").read_text())
    assert (kept["micro_batch"], kept["probes"][-1]["status"]) == (None, "failed")
    repaired = Fake(room=5)
    assert search(searching(tmp_path, repaired).fits, 1, 100) == 5
    assert repaired.started[0] == 4, "what failed is tried again"


@pytest.mark.thorough
def test_a_memory_limit_is_an_ordinary_out_of_memory(tmp_path):
    spec = dataclasses.replace(TINY, model="DiT-T/4", data="synthetic", global_batch=64, steps=1)
    over = launched(spec, tmp_path, "--memory-limit", str(64 * MIB))
    assert over.status is Status.HOST_OOM, f"{over.status} {over.reason}"
    assert "allocate" in over.reason and "checkpoint" in over.way_out

"""Functions in forks: what they return, how many at a time, and what is lost with one that dies."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.planner.tracing import forks
from harness.planner.tracing.forks import EARLY, in_forks


def test_each_answers_by_its_index_and_so_many_run_at_a_time(tmp_path: Path):
    def began() -> int:
        return len([*tmp_path.glob("began-*")])

    def function(index: int):
        def run() -> dict:
            (tmp_path / f"began-{index}").touch()
            there = began() - len([*tmp_path.glob("ended-*")])
            end = time.monotonic() + 30
            while began() < 2 and time.monotonic() < end:  # the first waits for the second
                time.sleep(0.01)
            time.sleep(0.05)  # a third would show
            both = began() >= 2
            (tmp_path / f"ended-{index}").touch()
            more = {"there": there, "both": both, "pid": os.getpid()}
            return {"index": index, "long": "x" * 3_000_000, **more}

        return run

    found = {one.index: one.made for one in in_forks([function(i) for i in range(5)], 2, 60)}
    assert {index: made["index"] for index, made in found.items()} == {i: i for i in range(5)}
    assert all(made["both"] and made["there"] <= 2 for made in found.values())
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


def test_whoever_takes_one_does_so_beside_those_that_run(tmp_path: Path):
    def function(index: int):
        def run() -> dict:
            (tmp_path / f"{index}").touch()
            return {}

        return run

    for place, _ in enumerate(in_forks([function(i) for i in range(3)], 1, 60)):
        end = time.monotonic() + 30
        while place < 2 and not (tmp_path / f"{place + 1}").exists():
            assert time.monotonic() < end, "the next one waits"
            time.sleep(0.01)


def test_what_one_imported_is_there_for_the_next(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)

    def function() -> dict:
        there = "colorsys" in sys.modules
        importlib.import_module("colorsys")
        return {"there": there}

    found = {one.index: one.made["there"] for one in in_forks([function] * 3, 1, 60)}
    assert found == {0: False, 1: True, 2: True}


IN_A_FORK = """
import os, torch
from torch._subclasses import FakeTensorMode
from harness.planner import worker
from harness.planner.tracing import forks
from harness.resolve import resolve
from harness.spec import Spec

torch.set_num_threads(6)  # it makes torch's pool of threads; six make a lost race likely
parent, run = os.getpid(), torch.autograd.graph._engine_run_backward


def watched(*given, **more):
    assert os.getpid() != parent, "a backward before a fork"
    return run(*given, **more)


torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = watched


def first() -> dict:
    with FakeTensorMode():  # with a build for CUDA, this shows autograd eight GPUs
        torch.ones(1, requires_grad=True).sum().backward()
    return {"threads": len(os.listdir("/proc/self/task"))}


def second() -> dict:
    return [*forks.in_forks([first], 1, 60)][0].made


for one in forks.in_forks([second] * 12, 2, 60):
    assert one.made.get("threads"), one.made
torch.set_num_threads(1)
shape = "num_layers=1,num_single_layers=1"
public = Spec(
    recipe="single+lora:rank=2", model="flux-dev", set=shape, objective="flow", device="cuda",
    data="synthetic", global_batch=1, processes=1, ema=0.0,
)
rows = [resolve(public)]
for _, found in worker.predict_each(rows, ["flash"] * len(rows), 1, 120):
    assert found.method == "trace", (found.reason, found.fault)
"""


@pytest.mark.thorough
def test_a_fork_can_run_backward_with_a_build_of_torch_for_gpus():
    """Such a build starts threads at the first backward: none may run before a fork, and in the
    fork they all ask for torch's pool of threads at once."""
    done = subprocess.run([sys.executable, "-c", IN_A_FORK], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

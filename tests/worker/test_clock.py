"""The clock is not bent by the meter, by what the kernel counted; no test asks for a time."""

from __future__ import annotations

import json
import mmap
import os
import statistics
import subprocess
import sys

import pytest

from harness import ROOT
from harness.launch.command import ALLOCATOR
from harness.system import machine
from harness.worker import samples


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Minor faults and peaks of a run with the clock's heap (``own``), and of one that keeps the
    meter's (``bent``)."""
    words = [sys.executable, "-m", "tests.children.clock", str(tmp_path_factory.mktemp("clock"))]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **ALLOCATOR}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_timed_steps_do_not_fault_in_fresh_pages_while_memory_steps_do(runs):
    """A median: glibc gives the top of the heap back now and then, whoever trains."""
    own, bent = runs["own"], runs["bent"]
    watched = min(own["watched"])
    assert watched > 2000, "a step under the meter faults all its tensors in"
    assert statistics.median(own["timed"]) < watched / 10
    # The control: without the change of heaps they would.
    assert min(bent["timed"]) > 0.8 * watched and min(bent["settling"]) > 0.8 * watched


def test_peaks_still_follow_the_tensors(runs):
    own, bent = runs["own"]["peaks"], runs["bent"]["peaks"]
    assert set(own) == set(bent) >= {"first_step", "steady", "forward", "backward", "optimizer"}
    stepped = max(own[name] for name in ("forward", "backward", "optimizer"))
    traced = runs["own"]["traced"]
    assert traced < stepped < 1.2 * traced, "and some of the libraries' scratch"
    for name, peak in own.items():  # read before the heap changed, so that nothing moved
        assert peak == pytest.approx(bent[name], rel=0.05, abs=2**20), name


def test_a_process_with_a_heap_of_its_own_keeps_it(monkeypatch):
    asked = []
    monkeypatch.setattr(samples.ctypes, "CDLL", lambda _: type("Libc", (), {"mallopt": mallopt}))

    def mallopt(name, value):
        asked.append((name, value))
        return 1

    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    assert samples.keep_freed() is False and asked == []
    for name, value in ALLOCATOR.items():
        monkeypatch.setenv(name, value)
    assert samples.keep_freed() is True
    assert asked == [(-3, 32 * 2**20), (-1, 64 * 2**20)]
    monkeypatch.setattr(samples.ctypes, "CDLL", lambda _: object())  # another C library
    assert samples.keep_freed() is False


STAT = """cpu  100 0 50 900 30 0 0 0 0 0
cpu0 60 1 20 400 10 2 3 4 60 0
cpu1 40 0 30 500 20 0 0 0 0 0
intr 12345
"""


@pytest.mark.parametrize(("cores", "ticks"), [({0}, 90), ({0, 1}, 160), ({7}, 0)])
def test_busy_seconds_are_of_the_cores_that_the_process_may_use(
    cores, ticks, tmp_path, monkeypatch
):
    """Steal is others' work, and guest is in user's."""
    (tmp_path / "stat").write_text(STAT)
    monkeypatch.setattr(machine.psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: cores)
    assert machine.busy_now() == pytest.approx(ticks / os.sysconf("SC_CLK_TCK"))
    (tmp_path / "stat").unlink()
    assert machine.busy_now() == 0


def test_a_process_is_charged_for_its_own_work():
    before = samples.now()
    fresh = mmap.mmap(-1, 2**24)  # from the kernel, not from what the heap kept
    fresh.write(b"1" * 2**24)
    while (used := samples.now() - before).cpu_seconds < 0.05:
        sum(range(10_000))
    assert used.minor_faults > 0
    assert samples.as_usage([used]).cpu_seconds == [used.cpu_seconds]
    assert samples.as_usage([]).cpu_seconds == []

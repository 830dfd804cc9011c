"""The clock is not bent by the meter, by what the kernel counted; no test asks for a time."""

import json
import os
import statistics
import subprocess
import sys

import pytest

from harness import ROOT
from harness.launch.command import ALLOCATOR
from harness.system import machine


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Minor faults of a measured run's steps."""
    words = [sys.executable, "-m", "tests.children.clock", str(tmp_path_factory.mktemp("clock"))]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **ALLOCATOR}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_timed_steps_do_not_fault_in_fresh_pages_while_memory_steps_do(runs):
    """A median: glibc gives the top of the heap back now and then, whoever trains."""
    watched = min(runs["watched"])
    assert watched > 2000, "a step under the meter faults all its tensors in"
    assert statistics.median(runs["timed"]) < watched / 10


STAT = """cpu  100 0 50 900 30 0 0 0 0 0
cpu0 60 1 20 400 10 2 3 4 60 0
cpu1 40 0 30 500 20 0 0 0 0 0
intr 12345
"""


@pytest.mark.parametrize(("cores", "ticks"), [({0}, 90), ({0, 1}, 160)])
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

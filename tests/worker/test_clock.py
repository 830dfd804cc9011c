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

CHILD = """
import json, sys
from pathlib import Path
import torch
from harness.resolve import resolve
from harness.spec import Spec
from harness.worker import measure
from harness.worker.status import Reporter
folder, seen = Path(sys.argv[1]), []
spec = Spec(recipe="single", model="DiT-T/4", global_batch=8, warmup=2, steps=4)
measure.result_of = lambda bench, ranks, *rest: seen.extend((bench.log, ranks[0]))
torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine
measure.measure(resolve(spec), folder, Reporter(folder, 0))
each = [step.minor_faults for step in seen[0].used[1:]]  # the first makes the optimizer's state
print(json.dumps([each[: spec.warmup], seen[1].step_usage.minor_faults]))
"""


def test_timed_steps_do_not_fault_in_fresh_pages_while_memory_steps_do(tmp_path):
    """A median: glibc gives the top of the heap back now and then, whoever trains."""
    words, env = [sys.executable, "-c", CHILD, str(tmp_path)], {**os.environ, **ALLOCATOR}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    watched, timed = json.loads(done.stdout.splitlines()[-1])
    assert min(watched) > 2000, "a step under the meter faults all its tensors in"
    assert statistics.median(timed) < min(watched) / 10


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

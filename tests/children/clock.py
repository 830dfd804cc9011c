"""What a measured run's steps fault in, with its own heap for the clock and without.

python -m tests.children.clock FOLDER, from the repository's root, with the allocator's settings of
a run on CPUs. Prints for each case the minor faults of its steps and its peaks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from harness.resolve import resolve
from harness.spec import Spec
from harness.worker import measure, samples
from harness.worker.status import Reporter

SPEC = Spec(recipe="single", model="DiT-T/4", global_batch=8, warmup=2, steps=4)


def faults(folder: Path) -> dict[str, object]:
    """Of one run in this process: ``watched`` steps, ``settling`` and ``timed``."""
    seen = {}

    def kept(bench, ranks, *rest):
        seen["log"], seen["rank"] = bench.log, ranks[0]

    measure.result_of = kept
    torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine
    measure.measure(resolve(SPEC), folder, Reporter(folder, 0))
    log, rank = seen["log"], seen["rank"]
    each = [step.minor_faults for step in log.used]
    return {
        "watched": each[1 : SPEC.warmup + 1],  # the first step makes the optimizer's state
        "settling": each[SPEC.warmup + 1 : log.timed_from],
        "timed": rank.step_usage.minor_faults,
        "peaks": {name: peak.allocated for name, peak in rank.phases.items()},
        "traced": rank.categories.total,
    }


def in_fork(folder: Path, *, bent: bool) -> dict[str, object]:
    """``faults`` in a process of its own; ``bent`` leaves the meter's heap in force."""
    into, child = os.pipe(), os.fork()
    if child == 0:
        if bent:
            samples.keep_freed = lambda: False
        with os.fdopen(into[1], "w") as pipe:
            json.dump(faults(folder), pipe)
        os._exit(0)
    os.close(into[1])
    with os.fdopen(into[0]) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


if __name__ == "__main__":
    base = Path(sys.argv[1])
    print(json.dumps({name: in_fork(base / name, bent=name == "bent") for name in ("own", "bent")}))

"""What a measured run's steps fault in.

python -m tests.children.clock FOLDER, from the repository's root, with the allocator's settings of
a run on CPUs. Prints the minor faults of its steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from harness.resolve import resolve
from harness.spec import Spec
from harness.worker import measure
from harness.worker.status import Reporter

SPEC = Spec(recipe="single", model="DiT-T/4", global_batch=8, warmup=2, steps=4)


def faults(folder: Path) -> dict[str, object]:
    """Of one run in this process: ``watched`` steps, and ``timed``."""
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
        "timed": rank.step_usage.minor_faults,
    }


if __name__ == "__main__":
    print(json.dumps(faults(Path(sys.argv[1]))))

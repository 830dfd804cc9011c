"""Says how accelerate started it: one line of JSON a rank, below the folder given.

Not the worker: only its way of making an Accelerator, so that launch files are tested alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed

from harness.resolve import resolve
from harness.spec import Spec
from harness.system.process import die_with_parent
from harness.worker.setup import make_accelerator


def timeouts() -> list[float]:
    """Seconds that collectives may take: those of the first group, and of one made later."""
    groups = [distributed.group.WORLD, distributed.new_group()]
    gloo = (group._get_backend(torch.device("cpu")) for group in groups)
    return [one.options._timeout.total_seconds() for one in gloo]


die_with_parent()
accelerator = make_accelerator(resolve(Spec(recipe=sys.argv[2], processes=int(sys.argv[3]))))
facts = {
    "type": accelerator.distributed_type.value,
    "processes": accelerator.num_processes,
    "device": accelerator.device.type,
    "precision": accelerator.mixed_precision,
    "threads": os.environ["OMP_NUM_THREADS"],
    "timeouts": timeouts(),
}
path = Path(sys.argv[1]) / f"rank{accelerator.process_index}.json"
path.write_text(json.dumps(facts))
accelerator.end_training()

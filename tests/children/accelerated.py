"""Says how accelerate started it: one line of JSON a rank, below the folder given.

Not the worker: only its way of making an Accelerator, so that launch files are tested alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from accelerate import Accelerator, InitProcessGroupKwargs

from harness.system.process import die_with_parent

die_with_parent()
handlers = [] if sys.argv[2] == "NO" else [InitProcessGroupKwargs(backend="gloo")]
accelerator = Accelerator(kwargs_handlers=handlers)
facts = {
    "type": accelerator.distributed_type.value,
    "processes": accelerator.num_processes,
    "device": accelerator.device.type,
    "precision": accelerator.mixed_precision,
    "threads": os.environ["OMP_NUM_THREADS"],
}
path = Path(sys.argv[1]) / f"rank{accelerator.process_index}.json"
path.write_text(json.dumps(facts))
accelerator.end_training()

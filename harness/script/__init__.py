"""A user's own training script, unchanged, measured under several launch files.

The script makes one ``accelerate.Accelerator`` and calls ``prepare``, ``backward`` and
``optimizer.step``. ``run`` patches these public calls in the script's process, counts optimizer
steps, and ends the script after the last measured one. ``command`` starts a process group for each
launch file and strategy, and compares the rows. ``measured`` does the same for a loop in a
notebook.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any


def measured(
    accelerator: Any, out: str | Path, *, warmup: int = 2, steps: int = 8, name: str = "own loop"
) -> AbstractContextManager[Any]:
    """Return a context that measures the training loop within it.

    The context ends the loop after the last measured optimizer step, writes ``out/result.json``,
    and prints its path and the row. Prepare model and optimizer before or within it.

    Args:
        accelerator: the loop's own ``accelerate.Accelerator``.
        out: folder for the result.
        warmup: first optimizer steps, which are not timed.
        steps: timed optimizer steps.
        name: name of the loop in the report.
    """
    from harness.script.run import measured_loop

    return measured_loop(accelerator, Path(out), warmup=warmup, steps=steps, name=name)

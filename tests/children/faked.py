"""The command line with rows that end at once, but for one that is a process, as a worker's is.

python -m tests.children.faked RUNS WORDS...   RUNS: the recipe of that row, which hangs until it is
ended; "good:RECIPE" ends by itself, and "none" is none of them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from harness import cli
from harness.commands import console
from harness.launch import launch
from harness.result import Result, Status
from harness.system import gpus, process
from harness.system import machine as machines
from tests.made.machines import machine
from tests.made.results import ok

REAL = launch.run
FAILS = "zero1"
"""The recipe of the row that fails."""


def row(resolved, folder: Path, *, runs: str = "none", **more) -> Result:
    """What ``launch.run`` returns of a run that has ended."""
    spec, (mode, _, recipe) = resolved.spec, runs.rpartition(":")
    if spec.recipe == recipe:
        words = [sys.executable, "-m", "tests.children.worker", mode or "hang", str(folder)]
        words.append("harness.train")  # by which another Headroom knows a worker
        return REAL(resolved, folder, argv=lambda port: words, **more)
    done = ok(spec.recipe)
    done.spec, done.losses, done.grad_norms = spec, [1.0, 0.9], [0.1, 0.1]
    if spec.recipe == FAILS:
        done = Result(status=Status.FAILED, spec=spec, reason="it broke", way_out="mend it")
    done.write(folder / "result.json")
    return done


@contextlib.contextmanager
def faked(runs: str = "none") -> Iterator[None]:
    """Rows as above, on a machine without GPUs that need not be examined."""
    patches = {
        (launch, "run"): lambda resolved, folder, **more: row(resolved, folder, runs=runs, **more),
        (console, "examine"): lambda folder, ops=(), **more: machine(folder),
        (console, "recall"): machines.look,
        (gpus, "visible"): lambda: (),
    }
    with contextlib.ExitStack() as stack:
        for (module, name), stand_in in patches.items():
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield


if __name__ == "__main__":
    process.GRACE_SECONDS = 0.5
    with faked(sys.argv[1]):
        sys.exit(cli.main(sys.argv[2:]))

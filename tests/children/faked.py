"""The command line with rows that end at once, but for one that hangs until it is ended.

python -m tests.children.faked HANGS WORDS...   HANGS: the recipe of that row, or "none"
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from harness import cli
from harness.commands import console, one_row, run
from harness.launch import launch
from harness.result import Result, Status
from harness.system import gpus, process
from harness.system import machine as machines
from tests.made.machines import machine
from tests.made.results import ok

REAL = launch.run
FAILS = "zero1"
"""The recipe of the row that fails."""


def row(resolved, folder: Path, *, hangs: str = "none", **more) -> Result:
    """What ``launch.run`` returns of a run that has ended."""
    spec = resolved.spec
    if spec.recipe == hangs:
        words = [sys.executable, "-m", "tests.children.worker", "hang", str(folder)]
        return REAL(resolved, folder, argv=lambda port: words, **more)
    done = ok(spec.recipe)
    done.spec, done.losses, done.grad_norms = spec, [1.0, 0.9], [0.1, 0.1]
    if spec.recipe == FAILS:
        done = Result(status=Status.FAILED, spec=spec, reason="it broke", way_out="mend it")
    done.write(folder / "result.json")
    return done


@contextlib.contextmanager
def faked(hangs: str = "none") -> Iterator[None]:
    """Rows as above, on a machine without GPUs that need not be examined."""
    patches = {
        (launch, "run"): lambda resolved, folder, **more: row(
            resolved, folder, hangs=hangs, **more
        ),
        (console, "examine"): lambda folder, ops=(), **more: machine(folder),
        (run, "recall"): machines.look,
        (one_row, "recall"): machines.look,
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

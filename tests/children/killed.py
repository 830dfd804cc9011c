"""A stand-in for the harness, to be killed: runs one worker, says how the run was ended.

python -m tests.children.killed MODE FOLDER, from the repository's root.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from harness.system import process
from harness.system.process import Interrupted, run_child
from tests.made.living import Looks

process.GRACE_SECONDS = 0.5
mode, folder = sys.argv[1], Path(sys.argv[2])
argv = [sys.executable, "-m", "tests.children.worker", mode, str(folder)]
try:
    run_child(
        argv,
        cwd=Path.cwd(),
        env=dict(os.environ),
        log=folder / "log.txt",
        timeout=300,
        on_tick=Looks(folder),
        scratch=(folder / "nvme",),
    )
except Interrupted as error:
    print(error, error.ended.stopped, error.ended.survivors)
    sys.exit(7)

"""One run in its own process, so that several run at a time and each can be ended.

``python -m harness.planner.calibrate.one SPEC FOLDER SECONDS``. No torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.launch import launch
from harness.resolve import resolve
from harness.spec import Spec
from harness.system.process import Interrupted


def main(argv: Sequence[str]) -> int:
    """Launch the run, which writes ``FOLDER/result.json``; return 130 if a signal ended it."""
    spec = Spec(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    try:
        launch.run(resolve(spec), Path(argv[1]), timeout=float(argv[2]))
    except Interrupted:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

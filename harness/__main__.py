"""Entry point of ``python -m harness``, which ``./run.sh`` runs, and of ``headroom``."""

from __future__ import annotations

import os
import sys

from harness import ROOT
from harness.cli import main


def start() -> int:
    # Children import the harness, and nothing from their current folder, as run.sh has it.
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = [path for path in others if path and path != str(ROOT)]
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *rest])}
    return main()


if __name__ == "__main__":
    sys.exit(start())

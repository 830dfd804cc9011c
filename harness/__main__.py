"""Entry point of ``python -m harness``, which ``./run.sh`` runs."""

from __future__ import annotations

import sys

from harness.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m harness``: what ``./run.sh`` hands over to."""

from __future__ import annotations

import sys

from harness.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m tests.recount FOLDER...``: print mismatches, one a line; exit with 1 if any."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.recount.numbers import faults
from tests.recount.raw import ResultSet

if __name__ == "__main__":
    found = [
        f"{name}: {fault}"
        for name in sys.argv[1:]
        for fault in faults(
            json.loads((Path(name) / "report.json").read_text()), ResultSet(Path(name))
        )
    ]
    print("\n".join(found) or "no mismatch")
    sys.exit(bool(found))

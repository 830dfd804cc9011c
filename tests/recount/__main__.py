"""``python -m tests.recount [FOLDER...]``: mismatches, one a line; exits with 1 if any."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.recount.house import faults, set_faults


def main(folders: list[str]) -> int:
    every = [f for name in folders for f in set_faults(Path(name))] if folders else list(faults())
    print("\n".join(every) or "no mismatch")
    return bool(every)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

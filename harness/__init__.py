"""Command line, worker, measurement and reports of Headroom."""

import os
from pathlib import Path

__all__ = ["CLONE", "KEPT", "RESULTS", "ROOT", "RUN", "SET_UP"]

__version__ = "0.1.0"

ROOT = Path(__file__).resolve().parent.parent
"""The folder of the packages, in which processes start: the repository's root, or site-packages."""
CLONE = (ROOT / "run.sh").is_file()
"""Whether this is a clone of the repository; else it is an installed package."""
RUN = "./run.sh" if CLONE else "headroom"
"""The command, as messages name it."""
SET_UP = "let ./run.sh set up its environment" if CLONE else "pip install 'headroom-dit[run]'"
"""What installs torch and all else that training and tracing need."""
RESULTS = (ROOT if CLONE else Path()) / "results"
"""The folder of results: in the clone, or in the working folder of an installed command."""
_HOME = os.path.join(os.path.expanduser("~"), ".local", "share")
_DATA = os.environ.get("XDG_DATA_HOME") or (_HOME if os.path.isabs(_HOME) else os.devnull)
KEPT = RESULTS if CLONE else Path(_DATA) / "headroom"
"""The folder of what later plans read, traced predictions and calibrations: an installed command
reads none from the working folder, whose files may be anybody's."""

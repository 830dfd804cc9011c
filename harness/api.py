"""The library door: a plan's rows, the measurement of a loop, and the results of a folder.

    from harness.api import load_results, measured, plan

``plan`` and ``load_results`` import no torch. Errors are ``BadInput``, of one line.
docs/examples/library.py uses all three.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from harness.planner.plan.rows import PlanRow, plan
from harness.result import Result, load_all
from harness.script import measured
from strategies.base import BadInput

__all__ = ["BadInput", "PlanRow", "Result", "load_results", "measured", "plan"]


def load_results(folder: str | Path) -> list[Result]:
    """Return the measured rows of a results folder; a warning names each unreadable file."""
    results, skipped = load_all(Path(folder))
    for line in skipped:
        warnings.warn(line, stacklevel=2)
    if not results:
        raise BadInput(f"{folder}: no results in it; give a folder that run or measured made")
    return results

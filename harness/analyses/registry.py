"""Registry of analyses: tables of one suite's rows together, shown before the ranking.

A suite names its analysis (``story: ladder``). A new analysis is a module with a function
``tables``, and one line in ``STORIES``.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.analyses import claims, each, scale, suites
from harness.report.data.grid import Grid
from harness.report.data.rows import Report
from harness.sampling import analyses

__all__ = ["OF_A_STEP", "STORIES", "tables"]

STORIES: dict[str, Callable[[Report], list[Grid]]] = {
    "claims": claims.tables,
    "each": each.tables,
    "ladder": suites.ladder_tables,
    "fast_dit": suites.fast_dit_tables,
    "depth": suites.tables,
    "quality": analyses.tables,
    "sampled": analyses.sampled_tables,
    "long": suites.long_tables,
    "scale": scale.tables,
    "vocabulary": suites.vocabulary_tables,
}
OF_A_STEP = ("claims", "each", "ladder", "vocabulary")
"""Analyses whose memory is the peak of one training step (``harness.report.data.lookup``)."""


def tables(report: Report) -> list[Grid]:
    """Return the tables of the suite's analysis; none without one."""
    tell = STORIES.get(report.suite.story)
    return tell(report) if tell else []

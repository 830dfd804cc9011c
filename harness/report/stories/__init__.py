"""Stories: what the rows of one suite tell together, as a table or two before the ranking.

A suite names its story (``story: ladder``). Another story is one module here with a function
``tables``, and one line in ``STORIES``.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.report.data.grid import Grid
from harness.report.data.rows import Report
from harness.report.stories import (
    claims,
    depth,
    drawn_claims,
    each,
    fast_dit,
    ladder,
    long,
    sampled,
    scale,
    vocabulary,
)

__all__ = ["OF_A_STEP", "STORIES", "tables"]

STORIES: dict[str, Callable[[Report], list[Grid]]] = {
    "claims": claims.tables,
    "each": each.tables,
    "ladder": ladder.tables,
    "fast_dit": fast_dit.tables,
    "depth": depth.tables,
    "quality": drawn_claims.tables,
    "sampled": sampled.tables,
    "long": long.tables,
    "scale": scale.tables,
    "vocabulary": vocabulary.tables,
}
OF_A_STEP = ("claims", "each", "ladder", "vocabulary")
"""Stories whose memory is the peak of one training step (``harness.report.data.lookup``)."""


def tables(report: Report) -> list[Grid]:
    """The tables of the suite's story; none where it has none."""
    tell = STORIES.get(report.suite.story)
    return tell(report) if tell else []

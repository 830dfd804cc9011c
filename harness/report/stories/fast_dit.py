"""The story "fast_dit": the table of fast-DiT's README, and the same techniques measured here."""

from __future__ import annotations

from harness.report.data.grid import Grid, text_grid
from harness.report.data.lookup import Missing, Rows
from harness.report.data.rows import Report
from harness.report.figures import units

__all__ = ["tables"]

PUBLISHED = (
    # checkpointing, mixed precision, features extracted before; steps/s, MB of device memory
    (False, False, False, None, None),
    (True, False, False, 0.43, 44045),
    (True, True, False, 0.56, 40461),
    (True, True, True, 0.84, 27485),
)
"""github.com/chuanyangjin/fast-DiT, README: DiT-XL/2, global batch 128, one A100."""
KINDS = {
    "Checkpointing": "text",
    "Mixed precision": "text",
    "Pre-extracted": "text",
    "Published steps/s": "rate",
    "Published MB": "count",
    "Steps/s here": "rate",
    "Needs here": "gib",
}
NOTE = (
    "Published: fast-DiT's README, DiT-XL/2 at a global batch of 128 on one A100. Without "
    "pre-extraction a VAE encodes images in every step; its weights are random, which changes "
    "neither memory nor speed. Model, batch and device of these rows are named below."
)


def tables(report: Report) -> list[Grid]:
    """One line for each published row, beside the suite's row in the same place."""
    rows, lines = Rows(report), []
    for published, recipe in zip(PUBLISHED, report.suite.order, strict=False):
        marks = ["yes" if on else "no" for on in published[:3]]
        theirs = ["out of memory"] * 2 if published[3] is None else [str(v) for v in published[3:]]
        lines.append([*marks, *theirs, *_here(rows, recipe, extracted=published[2])])
    return [text_grid("fast_dit", "The fast-DiT table", KINDS, lines, NOTE)]


def _here(rows: Rows, recipe: str, *, extracted: bool) -> list[str]:
    """Steps/s and need of our row; a recipe is there with a VAE in its step, or without."""
    try:
        row = rows.get(recipe, data=lambda data: data.startswith("vae") is not extracted)
    except Missing as missing:
        return [str(missing), units.NONE]
    seconds = row.numbers.step_seconds_median
    return [units.one("rate", 1 / seconds), units.gib(row.numbers.need_bytes)]

"""The story "fast_dit": the table of fast-DiT's README, and the same techniques measured here."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.data import speed
from harness.report.data.grid import Grid, text_grid
from harness.report.data.lookup import Missing, Rows
from harness.report.data.rows import Report, Row
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
    "Speed x": "ratio",
    "Needs here": "gib",
}
NOTE = (
    "Published: fast-DiT's README, DiT-XL/2 at a global batch of 128 on one A100. Without "
    "pre-extraction a VAE encodes images in every step; its weights are random, which changes "
    "neither memory nor speed. Speed: against the row above that was measured, where the noise "
    "does not explain it. Model, batch and device of these rows are named below."
)


CAREFUL = {
    "Recipe": "text",
    "Steps/s here": "rate",
    "Speed x": "ratio",
    "Needs here": "gib",
    "Against theirs %": "change",
}
CAREFUL_NOTE = (
    "The last published row's order of things, as above, and what the same features need with "
    "gradients let go behind the step, so that they do not live through the next one's passes; "
    "with fused attention, which keeps no score matrix; and with the average in host memory."
)


def tables(report: Report) -> list[Grid]:
    """One line for each published row, beside the suite's row in the same place; and the rows
    behind them, against the last of these."""
    published, behind = report.suite.order[: len(PUBLISHED)], report.suite.order[len(PUBLISHED) :]
    grids = [_published(Rows(report), published)]
    if behind:
        grids.append(_careful(Rows(report), published[-1], behind))
    return grids


def _published(rows: Rows, order: Sequence[str]) -> Grid:
    lines, above = [], None
    for published, recipe in zip(PUBLISHED, order, strict=False):
        marks = ["yes" if on else "no" for on in published[:3]]
        theirs = ["out of memory"] * 2 if published[3] is None else [str(v) for v in published[3:]]
        try:
            row = _here(rows, recipe, extracted=published[2])
            lines.append([*marks, *theirs, *_cells(row, above)])
            above = row
        except Missing as missing:
            lines.append([*marks, *theirs, str(missing), units.NONE, units.NONE])
    return text_grid("fast_dit", "The fast-DiT table", KINDS, lines, NOTE)


def _careful(rows: Rows, theirs: str, behind: Sequence[str]) -> Grid:
    lines, above = [], None
    for recipe in (theirs, *behind):
        try:
            row = _here(rows, recipe, extracted=True)
        except Missing as missing:
            lines.append([recipe, str(missing), *[units.NONE] * 3])
            continue
        above = above or row
        less = row.numbers.need_bytes / above.numbers.need_bytes - 1
        saved = units.NONE if row is above else units.one("change", less)
        lines.append([recipe, *_cells(row, None if row is above else above), saved])
    return text_grid("careful", "A careful trainer", CAREFUL, lines, CAREFUL_NOTE)


def _here(rows: Rows, recipe: str, *, extracted: bool) -> Row:
    """Our row of a recipe, which is there with a VAE in its step, or without."""
    return rows.get(recipe, data=lambda data: data.startswith("vae") is not extracted)


def _cells(row: Row, above: Row | None) -> list[str]:
    """Steps/s, what became of them since the row above, and need."""
    seconds = row.numbers.step_seconds_median
    ratio = units.NONE if above is None else units.one("ratio", speed.ratio(row, above))
    return [units.one("rate", 1 / seconds), ratio, units.gib(row.numbers.need_bytes)]

"""The story "ladder": each row keeps what the rows above it brought, and adds one technique."""

from __future__ import annotations

from harness.report.data import speed
from harness.report.data.grid import Grid, text_grid
from harness.report.data.lookup import Missing, Rows, step_bytes
from harness.report.data.rows import Report, Row
from harness.report.figures import units

__all__ = ["tables"]

RUN = "Whole run GiB"
KINDS = {
    "What was added": "text",
    "Peak GiB": "gib",
    RUN: "gib",
    "Saved by it": "percent",
    "Saved in all": "percent",
    "Samples/s": "rate",
    "Speed x": "ratio",
    "Losses": "text",
}
NOTE = (
    "Each row keeps what the rows above it brought; a technique in place of another cannot "
    "stand beside it. Peak: live tensors on the device in a step; saved: of that. Whole run: on a "
    "GPU what a device must have free, without one the resident mark of a process, loading and "
    "libraries included. Speed against the row above, where the noise does not explain it."
)


def tables(report: Report) -> list[Grid]:
    """Rows in the suite's order, each against the one above that was measured."""
    rows, lines, above, first = Rows(report), [], None, None
    for recipe in report.suite.order:
        try:
            row = rows.get(recipe)
            lines.append(_rung(row, above, first))
            above, first = row, first or row
        except Missing as missing:
            lines.append([f"+ {recipe}", *[units.NONE] * 6, str(missing)])
    return [text_grid("ladder", "The ladder", KINDS, lines, NOTE)]


def _rung(row: Row, above: Row | None, first: Row | None) -> list[str]:
    size = step_bytes(row)
    pace = units.one("rate", row.numbers.samples_per_second)
    cells = [_added(row, above), *(units.one("gib", b) for b in (size, whole_run(row)))]
    if above is None or first is None:
        return [*cells, units.NONE, units.NONE, pace, units.NONE, row.versus.parity]
    saved = [units.one("change", size / step_bytes(other) - 1) + " %" for other in (above, first)]
    ratio = units.one("ratio", speed.ratio(row, above))
    return [*cells, *saved, pace, ratio, row.versus.parity]


def whole_run(row: Row) -> int | None:
    """Bytes that a device must have free on a GPU; without one the resident mark."""
    numbers = row.numbers
    return numbers.need_bytes if row.first.meter == "cuda" else numbers.resident_peak_bytes


def _added(row: Row, above: Row | None) -> str:
    if above is None:
        return row.label
    here, there = (r.spec.recipe.split("+") for r in (row, above))
    new, gone = [p for p in here if p not in there], [p for p in there if p not in here]
    return f"+ {', '.join(new)}" + (f" (in place of {', '.join(gone)})" if gone else "")

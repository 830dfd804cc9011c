"""The ``each`` analysis: the change of a step's peak and speed by each technique alone."""

from __future__ import annotations

from collections.abc import Callable

from harness.report.data import lookup
from harness.report.data.grid import Grid, text_grid
from harness.report.data.lookup import Missing, Rows, beyond_state, state_bytes, step_bytes
from harness.report.data.rows import Report, Row
from harness.report.figures import units

KINDS = {
    "Recipe": "text",
    "Peak GiB": "gib",
    "State in it GiB": "gib",
    "Most beyond GiB": "gib",
    "Saved": "percent",
    "Samples/s": "rate",
    "Speed x": "ratio",
    "Losses": "text",
}


def tables(report: Report) -> list[Grid]:
    """Return rows in the suite's order, each compared with the reference."""
    rows, lines = Rows(report), []
    for recipe in report.suite.order:
        try:
            lines.append(against(rows.get(recipe), rows.get(report.suite.reference)))
        except Missing as missing:
            lines.append([recipe, *[units.NONE] * 6, str(missing)])
    note = (
        "Peak of one step. State: parameters, gradients, optimizer state and average alive at "
        "that peak. Most beyond: of activations and temporaries at any instant, so the two need "
        f"not add up. Saved and speed: against {report.suite.reference}. A row of one process "
        "trains the whole batch alone."
    )
    return [text_grid("each", "Each against the reference", KINDS, lines, note)]


def against(row: Row, reference: Row) -> list[str]:
    """Return a cell for each of ``KINDS``: a row compared with a reference of the same work."""
    sizes = [_or_none(measure, row) for measure in (step_bytes, state_bytes, beyond_state)]
    peak, reference_peak = sizes[0], _or_none(step_bytes, reference)
    rate = row.numbers.samples_per_second
    saved = ratio = units.NONE
    if row is not reference:
        ratio = units.one("ratio", lookup.ratio(row, reference))
        if peak is not None and reference_peak is not None:
            saved = units.one("change", peak / reference_peak - 1) + " %"
    cells = [units.one("gib", size) for size in sizes]
    return [row.label, *cells, saved, units.one("rate", rate), ratio, row.versus.parity]


def _or_none(measure: Callable[[Row], int], row: Row) -> int | None:
    """Return bytes, or None for a row that was not traced (a compiled one cannot be)."""
    try:
        return measure(row)
    except Missing:
        return None

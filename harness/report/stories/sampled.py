"""The story "sampled": memory against the distance of what is drawn, and against speed."""

from __future__ import annotations

import math

from harness.report.data import speed
from harness.report.data.grid import Grid, text_grid
from harness.report.data.lookup import Missing, Rows
from harness.report.data.rows import Report, Row
from harness.report.figures import derive, units

__all__ = ["front", "tables"]

KINDS = {
    "Recipe": "text",
    "Peak GiB": "gib",
    "Weights GiB": "gib",
    "Peak vs ref": "change",
    "Weights vs ref": "change",
    "Samples/s": "rate",
    "Speed x": "ratio",
    "Latency of one ms": "ms",
    "Samples": "text",
    "PSNR dB": "ratio",
    "Front": "text",
}
NOTE = (
    "Peak: live tensors at the fullest instant of a batch, of which weights are the parameters, as "
    "they are stored. Samples: equal to the reference's within what rounding explains, or the "
    "relative L2 distance of their latents. Front: no other row has both a smaller peak and "
    "samples that are as near."
)


def tables(report: Report) -> list[Grid]:
    """Rows in the suite's order, each against the reference."""
    rows, lines = Rows(report), []
    marked = front(report)
    for recipe in report.suite.order:
        try:
            row = rows.get(recipe)
            lines.append([*_line(row, rows.get(report.suite.reference)), _mark(row, marked)])
        except Missing as missing:
            lines.append([recipe, *[units.NONE] * 9, str(missing)])
    return [text_grid("sampled", "Memory against samples", KINDS, lines, NOTE)]


def front(report: Report) -> set[int]:
    """ids of the rows on the Pareto front of peak and distance, in the group of the reference."""
    group = report.groups[0] if report.groups else None
    rows = [row for row in group.rows if _able(row)] if group else []
    # The front wants what is better to be larger.
    points = [(row.numbers.peak_bytes, -_far(row)) for row in rows]
    return {id(rows[index]) for index in derive.pareto_front(points)}


def _able(row: Row) -> bool:
    known = row.drawn is not None and (row.versus.is_reference or row.drawn.away is not None)
    return known and not row.versus.wrong and row.numbers.peak_bytes is not None


def _far(row: Row) -> float:
    """The relative distance; rows that are equal are all as near as the reference."""
    if row.versus.is_reference or row.versus.parity == "equal":
        return 0.0
    return row.drawn.away.relative


def _mark(row: Row, marked: set[int]) -> str:
    return "front" if id(row) in marked else ""


def _line(row: Row, reference: Row) -> list[str]:
    numbers, drawn = row.numbers, row.drawn
    if drawn is None:
        raise Missing(f"{row.label} drew no samples")
    mine, theirs = ((r.numbers.peak_bytes, r.numbers.parameters_bytes) for r in (row, reference))
    changes = [_change(a, b) for a, b in zip(mine, theirs, strict=True)]
    changes = [units.NONE, units.NONE] if row is reference else changes
    ratio = units.NONE if row is reference else units.one("ratio", speed.ratio(row, reference))
    away = drawn.away
    far = f"{row.versus.parity} {units.one('distance', away.relative)}" if away else ""
    psnr = away and ("same" if math.isinf(away.psnr_db) else units.one("ratio", away.psnr_db))
    return [
        row.label,
        *(units.one("gib", size) for size in mine),
        *changes,
        units.one("rate", numbers.samples_per_second),
        ratio,
        units.one("ms", drawn.latency_seconds),
        far or row.versus.parity,
        psnr or units.NONE,
    ]


def _change(mine: int | None, theirs: int | None) -> str:
    if not mine or not theirs:
        return units.NONE
    return units.one("change", mine / theirs - 1) + " %"

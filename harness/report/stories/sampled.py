"""The story "sampled": memory against the distance of what is drawn, and against speed."""

from __future__ import annotations

import math

from harness.report.data import speed
from harness.report.data.grid import Grid, text_grid
from harness.report.data.lookup import Missing, Rows
from harness.report.data.rows import Report, Row
from harness.report.figures import derive, units

__all__ = ["front", "tables"]

RECIPE, FRONT = "Recipe", "Front"
KINDS = {
    RECIPE: "text",
    "Peak MiB": "mib",
    "Weights MiB": "mib",
    "Peak vs ref": "change",
    "Weights vs ref": "change",
    "Samples/s": "rate",
    "Speed x": "ratio",
    "Latency of one ms": "ms",
    "Samples": "text",
    "PSNR dB": "ratio",
    "Recognised %": "percent",
    "As reference's %": "percent",
    FRONT: "text",
}
NOTE = (
    "Peak: live tensors at the fullest instant of a batch, of which weights are the parameters, as "
    "they are stored. Samples: equal to the reference's within what rounding explains, or the "
    "relative L2 distance of their latents. Recognised, of digits: what a classifier of the same "
    "digits takes for what was asked; as reference's: for what it takes the reference's sample "
    "for. Front: no other row has both a smaller peak and samples that are as near."
)


def tables(report: Report) -> list[Grid]:
    """Rows in the suite's order, each against the reference."""
    rows, lines, marked = Rows(report), [], front(report)
    batch = report.groups[0].reference.spec.global_batch if report.groups else None
    for recipe in dict.fromkeys(report.suite.order):
        try:
            row = rows.get(recipe, global_batch=batch)
            cells = _cells(row, rows.get(report.suite.reference, global_batch=batch))
            lines.append(cells | {FRONT: _mark(row, marked)})
        except Missing as missing:
            lines.append({RECIPE: recipe, FRONT: str(missing)})
    kept = {head: kind for head, kind in KINDS.items() if any(line.get(head) for line in lines)}
    texts = [[line.get(head) or ("" if head == FRONT else units.NONE) for head in kept]
             for line in lines]  # fmt: skip
    return [text_grid("sampled", "Memory against samples", kept, texts, NOTE)]


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


def _cells(row: Row, reference: Row) -> dict[str, str | None]:
    """Head -> text; None, or no head, where there is nothing to say."""
    numbers, drawn = row.numbers, row.drawn
    if drawn is None:
        raise Missing(f"{row.label} drew no samples")
    cells = {RECIPE: row.label} | _sizes(row, reference)
    if row is not reference:
        cells["Speed x"] = units.one("ratio", speed.ratio(row, reference))
    away = drawn.away
    far = f" {units.one('distance', away.relative)}" if away else ""
    psnr = away and ("same" if math.isinf(away.psnr_db) else units.one("ratio", away.psnr_db))
    shares = {"Recognised %": drawn.recognised, "As reference's %": drawn.agreed}
    return cells | {
        "Samples/s": units.one("rate", numbers.samples_per_second),
        "Latency of one ms": units.one("ms", drawn.latency_seconds),
        "Samples": row.versus.parity + far,
        "PSNR dB": psnr,
        **{head: None if s is None else units.one("percent", s) for head, s in shares.items()},
    }


def _sizes(row: Row, reference: Row) -> dict[str, str | None]:
    """The peak and the weights in it, and how they changed."""
    cells = {}
    for head, name in (("Peak", "peak_bytes"), ("Weights", "parameters_bytes")):
        mine, theirs = (getattr(r.numbers, name) for r in (row, reference))
        cells[f"{head} MiB"] = units.one("mib", mine)
        if mine and theirs and row is not reference:
            cells[f"{head} vs ref"] = units.one("change", mine / theirs - 1) + " %"
    return cells

"""Pieces of the Markdown report: a table's lines."""

from __future__ import annotations

from harness.report.data.grid import Grid
from harness.report.figures import parity, units

__all__ = ["table_lines"]


def table_lines(grid: Grid) -> list[str]:
    """A table's lines; numbers to the right."""
    rules = ["---" if kind in units.TEXT else "--:" for kind in grid.kinds]
    lines = [_line(grid.heads), f"|{'|'.join(rules)}|"]
    for cells, marks in zip(grid.lines, grid.marks, strict=True):
        alarm = "alarm" in marks
        lines.append(_line([_cell(c, h, alarm) for c, h in zip(cells, grid.heads, strict=True)]))
    return lines


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str, head: str, alarm: bool) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    if head == "Recipe":
        return f"`{text}`"
    return f"**{text}**" if alarm and parity.alarming(text) else text

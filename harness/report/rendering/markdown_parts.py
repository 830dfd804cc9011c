"""Pieces of the Markdown report: a table's lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.report.data.grid import Grid
from harness.report.figures import parity, units

__all__ = ["code", "fence", "plain", "table_lines"]


def plain(text: str) -> str:
    """Text that results brought along (a reason, a name), as text: no HTML, no link, no picture
    comes out of it."""
    return text.replace("<", "&lt;").replace("](", "]\\(")


def code(text: str) -> str:
    """The same as code on a line, which it cannot leave."""
    return f"`{text.replace('`', chr(39))}`"


def fence(language: str, lines: Sequence[str]) -> list[str]:
    """A block of code whose lines cannot end it."""
    longest = max((len(run) for run in re.findall("`+", "\n".join(lines))), default=0)
    ticks = "`" * max(3, longest + 1)
    return [f"{ticks}{language}", *lines, ticks]


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
        return code(text)
    text = plain(text)
    return f"**{text}**" if alarm and parity.alarming(text) else text

"""Tables in a terminal, by rich: no number is cut, and columns that do not fit are named."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from harness.report.data.grid import Grid
from harness.report.figures import units

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LEAST_WORTH = ("vs ref %", "#", "Old GiB", "Grad norm", "Loss", "Limit %")
"""Heads of columns hidden first, in this order; then the others, the last one first."""
NAMES = ("Recipe", "Adding")
"""Heads of columns of recipes."""
PIECES = r"(?<=[+:,])"
LOOKS = {"alarm": "bold red", "front": "cyan", "reference": "bold"}
NAME, WORD = 16, 20
"""Least width of a column of names, which break between parts, and most of one of prose."""
GAP = 2
"""Cells that rich adds to the width of a column: its padding and its edge."""
Styles = Mapping[str, Mapping[str, str]]
"""Head -> cell -> style."""


def print_grid(
    grid: Grid,
    console: Console,
    *,
    least_worth: Sequence[str] = LEAST_WORTH,
    stays: Sequence[str] = (),
    styles: Styles | None = None,
) -> None:
    """Print a table; name the columns that do not fit, and print the cells of hidden notes.

    Args:
        least_worth: heads of columns that are hidden first if space is short.
        stays: heads of columns that are never hidden.
    """
    heads = grid.heads
    name = next((i for i, head in enumerate(heads) if head in NAMES), 0)
    first = [heads.index(head) for head in least_worth if head in heads]
    order = [*first, *(i for i in reversed(range(len(heads))) if i not in first)]
    waiting = [i for i in order if i != name and heads[i] not in stays]
    widths = {i: _least(grid, i) for i in range(len(heads))}
    while waiting and sum(widths.values()) + GAP * len(widths) > console.width:
        del widths[waiting.pop(0)]
    room = console.width - sum(widths.values()) - GAP * len(widths)
    for i, least in widths.items():
        longest = max(map(len, [heads[i], *(line[i] for line in grid.lines)]))
        widths[i] += max(0, min(longest - least, room))
        room -= widths[i] - least
    console.print()
    console.print(_drawn(grid, widths, styles or {}))
    hidden = [i for i in range(len(heads)) if i not in widths]
    if hidden:
        text = f"Hidden columns: {', '.join(heads[i] for i in hidden)}. "
        text += "Widen the terminal, or set COLUMNS in a log."
        console.print(text, style="dim", highlight=False, markup=False)
    for i in (i for i in hidden if grid.columns[i].kind == "flag"):
        for line in (line for line in grid.lines if line[i] not in ("", units.NONE)):
            console.print(f"{line[name]}: {line[i]}", markup=False, highlight=False)


def _drawn(grid: Grid, widths: Mapping[int, int], styles: Styles) -> Table:
    """Return the table of the columns in ``widths``."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for i, width in widths.items():
        words = grid.columns[i].kind in units.TEXT
        table.add_column(
            Text(grid.heads[i]),
            justify="left" if words else "right",
            overflow="fold",
            width=width,
        )
    for line, marks in grid.rows:
        look = next((LOOKS[word] for word in LOOKS if word in marks), "")
        cells = []
        for i, width in widths.items():
            text = broken(line[i], width) if grid.heads[i] in NAMES else line[i]
            cells.append(Text(text, styles.get(grid.heads[i], {}).get(line[i], "")))
        table.add_row(*cells, style=look)
    return table


def broken(name: str, width: int) -> str:
    """Return a recipe's name on lines of ``width`` characters that end after ``+``, ``:`` or
    ``,``, and never within a word, if each of its words has room.
    """
    lines = [""]
    for piece in re.split(PIECES, name):
        if lines[-1] and len(lines[-1] + piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _least(grid: Grid, index: int) -> int:
    """Return a column's minimum width: numbers do not break, names and prose are folded."""
    head, cells = grid.heads[index], [line[index] for line in grid.lines]
    longest = max(map(len, cells), default=1)
    if grid.columns[index].kind not in units.TEXT:
        return max([longest, *map(len, head.split())])
    if head in NAMES:
        pieces = [piece for text in cells for piece in re.split(PIECES, text)]
        return min(longest, max([NAME, *map(len, pieces)]))
    words = [word for text in (head, *cells) for word in text.split()]
    return min(max(map(len, words), default=1), WORD)

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
    """Print a table.

    Args:
        least_worth: heads of columns that are hidden first if space is short.
        stays: heads of columns that are never hidden.
    """
    kept = list(range(len(grid.heads)))
    waiting = [i for i in _order(grid, least_worth) if grid.heads[i] not in stays]
    while waiting and sum(_least(grid, i) + GAP for i in kept) > console.width:
        kept.remove(waiting.pop(0))
    console.print()
    console.print(_drawn(grid, kept, _widths(grid, kept, console.width), styles or {}))
    _tell_hidden(grid, kept, console)


def _widths(grid: Grid, kept: Sequence[int], width: int) -> list[int]:
    """Return the width of each kept column: its minimum, and what is left for longer text."""
    widths = [_least(grid, index) for index in kept]
    room = width - sum(least + GAP for least in widths)
    for place, index in enumerate(kept):
        longest = max(map(len, [grid.heads[index], *(line[index] for line in grid.lines)]))
        more = max(0, min(longest - widths[place], room))
        widths[place] += more
        room -= more
    return widths


def _drawn(grid: Grid, kept: Sequence[int], widths: Sequence[int], styles: Styles) -> Table:
    """Return the table of the ``kept`` columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for index, width in zip(kept, widths, strict=True):
        words = grid.kinds[index] in units.TEXT
        table.add_column(
            Text(grid.heads[index]),
            justify="left" if words else "right",
            overflow="fold",
            width=width,
        )
    for line, marks in grid.rows:
        look = next((LOOKS[word] for word in LOOKS if word in marks), "")
        cells = [
            Text(
                broken(line[i], width) if grid.heads[i] in NAMES else line[i],
                styles.get(grid.heads[i], {}).get(line[i], ""),
            )
            for i, width in zip(kept, widths, strict=True)
        ]
        table.add_row(*cells, style=look)
    return table


def broken(name: str, width: int) -> str:
    """Return a recipe's name on lines of ``width`` characters that end after ``+``, ``:`` or
    ``,``, and never within a word, if each of its words has room."""
    lines = [""]
    for piece in re.split(PIECES, name):
        if lines[-1] and len(lines[-1] + piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _order(grid: Grid, least_worth: Sequence[str]) -> list[int]:
    """Return the columns in the order in which they are hidden; the name's is not among them."""
    heads = grid.heads
    name = next((i for i, head in enumerate(heads) if head in NAMES), 0)
    first = [heads.index(head) for head in least_worth if head in heads]
    order = [*first, *(i for i in reversed(range(len(heads))) if i not in first)]
    return [i for i in order if i != name]


def _least(grid: Grid, index: int) -> int:
    """Return a column's minimum width: numbers do not break, names and prose are folded."""
    cells = [line[index] for line in grid.lines]
    longest = max(map(len, cells), default=1)
    if grid.kinds[index] not in units.TEXT:
        return max([longest, *map(len, grid.heads[index].split())])
    if grid.heads[index] in NAMES:
        pieces = [piece for text in cells for piece in re.split(PIECES, text)]
        return min(longest, max([NAME, *map(len, pieces)]))
    words = [word for text in (grid.heads[index], *cells) for word in text.split()]
    return min(max(map(len, words), default=1), WORD)


def _tell_hidden(grid: Grid, kept: Sequence[int], console: Console) -> None:
    """Print the heads of the hidden columns, and the cells of hidden flags, by row."""
    left = [index for index in range(len(grid.heads)) if index not in kept]
    if not left:
        return
    heads = ", ".join(grid.heads[index] for index in left)
    text = f"Hidden columns: {heads}. Widen the terminal, or set COLUMNS in a log."
    console.print(text, style="dim", highlight=False, markup=False)
    name = grid.heads.index("Recipe") if "Recipe" in grid.heads else 0
    for index in (i for i in left if grid.kinds[i] == "flag"):
        for line in grid.lines:
            if line[index] not in ("", units.NONE):
                console.print(f"{line[name]}: {line[index]}", markup=False, highlight=False)

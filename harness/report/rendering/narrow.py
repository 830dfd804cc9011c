"""Tables in a terminal of any width, without cut cells.

A recipe is printed whole, so that it can be copied: one wider than its column gets a line of its
own above its numbers. Columns of the least worth are hidden and named. If too few would remain,
each row becomes a paragraph with all its cells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from harness.report.data.grid import Grid
from harness.report.figures import units

if TYPE_CHECKING:
    from rich.console import Console


ROOMY = 100
"""Terminal width from which every column of a short table fits."""
NAME, NARROW_NAME = 30, 18
"""Least width of a column of recipes, at 100 columns and at 80."""
RECIPES = ("Recipe", "What was added")
"""Heads of columns of recipes."""
LEAST_WORTH = ("Step ms", "vs ref %", "Notes", "#", "Old GiB", "Grad norm", "Loss", "Limit %",
               "Latency of one ms", "Weights vs ref", "PSNR dB", "As reference's %")  # fmt: skip
"""Heads of columns hidden first, in this order; then the others, the last one first."""
LOOKS = (("alarm", "bold red"), ("front", "cyan"), ("reference", "bold"))
NOTES, LONG_NOTE = "Notes", 16
"""Head of the last column, and the characters from which its text may stand below the row."""
GAP = 2
"""Blanks that a column adds to its own width."""
LONG_WORD = 24
"""Characters from which a word of prose is broken before a column is hidden."""
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
    """Print a table; a recipe wider than its column has its own line.

    Args:
        least_worth: heads of columns that are hidden first if space is short.
        stays: heads of columns that are never hidden.
    """
    columns = _columns(grid, _name_width(grid, console.width))
    least = [_least(*column) for column in columns]
    order = [i for i in _order(grid.heads, least_worth) if grid.heads[i] not in stays]
    kept = fitting(least, order, console.width)
    if 2 * len(kept) < len(grid.heads):
        _stack(grid, console)
        return
    _table(grid, columns, kept, console, styles or {})
    left = [head for index, head in enumerate(grid.heads) if index not in kept]
    if left:
        text = f"Hidden columns: {', '.join(left)}. Widen the terminal, or set COLUMNS in a log."
        console.print(Padding(Text(text, "dim"), (0, 0, 0, 1), expand=False))
        _tell_flags(grid, left, console)


def fitting(least: Sequence[int], order: Sequence[int], width: int) -> list[int]:
    """Return the indices of the columns that fit beside each other.

    Args:
        least: the minimum width of each column.
        order: indices of columns that may be hidden, in order.
    """
    kept, waiting = list(range(len(least))), list(order)
    while waiting and sum(least[i] + GAP for i in kept) > width:
        kept.remove(waiting.pop(0))
    if sum(least[i] + GAP for i in kept) > width:
        return []
    return kept


def folded(recipe: str, width: int) -> str:
    """Break a recipe wider than the terminal between its parts, or before a part's parameters."""
    lines = [""]
    for part in re.split(r"(?<=[+ ])", recipe):
        for piece in [part] if len(part) <= width else re.split(r"(?<=[:,])", part):
            if lines[-1] and len(lines[-1]) + len(piece) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(lines)


def _columns(grid: Grid, most: int) -> list[tuple[str, bool, list[str]]]:
    """Return head, True if it may break between words, and cells of each column.

    Recipes of more than ``most`` characters and long notes do not count, because they get a line of
    their own.
    """
    limits = dict.fromkeys(RECIPES, most) | {NOTES: LONG_NOTE}
    columns = []
    for head, kind, *cells in zip(grid.heads, grid.kinds, *grid.lines, strict=True):
        short = [cell for cell in cells if len(cell) <= limits.get(head, len(cell))]
        columns.append((head, kind in units.TEXT and head not in RECIPES, short))
    return columns


def _name_width(grid: Grid, width: int) -> int:
    """Return the length from which a recipe has a line of its own.

    Shorter ones leave the other columns as wide as they wish.
    """
    told = zip(grid.heads, *grid.lines, strict=True)
    columns = [(cells[0] in RECIPES, cells) for cells in told]
    room = width - sum(_longest(cells) + GAP for name, cells in columns if not name) - GAP
    lengths = [len(cell) for name, cells in columns if name for cell in cells if len(cell) <= room]
    return max([NAME if width >= ROOMY else NARROW_NAME, *lengths])


def _least(head: str, prose: bool, cells: Sequence[str]) -> int:
    """Return a column's minimum width: numbers and recipes do not break, prose does."""
    if prose:
        return min(LONG_WORD, _longest(w for c in (head, *cells) for w in c.split()))
    return _longest([*head.split(), *cells])


def _name_at(heads: Sequence[str]) -> int:
    """Return the index of the column of the rows' names."""
    return next((i for i, head in enumerate(heads) if head in RECIPES), 0)


def _longest(cells: Iterable[str]) -> int:
    return max((len(part) for cell in cells for part in cell.split("\n")), default=1)


def _order(heads: Sequence[str], least_worth: Sequence[str]) -> list[int]:
    """Return the columns without the row's name, in the order in which they are hidden."""
    name = _name_at(heads)
    first = [heads.index(head) for head in least_worth if head in heads]
    rest = [i for i in reversed(range(len(heads))) if i not in first]
    return [i for i in (*first, *rest) if i != name]


def _widths(columns: Sequence[tuple[str, bool, list[str]]], width: int) -> list[int]:
    """Return each column's width: its minimum, and a share of the remaining space.

    Prose is served first, because it breaks in every row, and then the smallest need.
    """
    widths = [_least(*column) for column in columns]
    room = width - sum(w + GAP for w in widths)
    whole = [_longest((head, *cells)) for head, _, cells in columns]  # without any break
    wishes = [most - least for most, least in zip(whole, widths, strict=True)]
    waiting = [i for i, wish in enumerate(wishes) if wish > 0]
    waiting.sort(key=lambda i: (not columns[i][1], wishes[i]))
    for place, index in enumerate(waiting):
        more = min(wishes[index], room // (len(waiting) - place))
        widths[index] += more
        room -= more
    return widths


def _table(
    grid: Grid,
    columns: Sequence[tuple[str, bool, list[str]]],
    kept: Sequence[int],
    console: Console,
    styles: Styles,
) -> None:
    widths = _widths([columns[i] for i in kept], console.width)
    heads, right = [grid.heads[i] for i in kept], [grid.kinds[i] not in units.TEXT for i in kept]
    console.print()
    for text in _beside([Text(head) for head in heads], widths, right, console, low=True):
        console.print(text, style="bold", no_wrap=True)
    rule = "-" if console.options.ascii_only else "\u2500"
    console.print(f" {rule * (sum(widths) + GAP * (len(widths) - 1))}", no_wrap=True)
    name = _name_at(heads)
    indent = 1 + sum(width + GAP for width in widths[:name])
    for line, marks in zip(grid.lines, grid.marks, strict=True):
        look = next((look for word, look in LOOKS if word in marks), "")
        cells = [Text(line[i], styles.get(grid.heads[i], {}).get(line[i], "")) for i in kept]
        if heads[name] in RECIPES and len(cells[name]) > widths[name]:
            long = folded(cells[name].plain, console.width - indent)
            room = [*widths[:name], console.width - indent]
            for text in _beside([*cells[:name], Text(long)], room, right[: name + 1], console):
                console.print(text, style=look, no_wrap=True)
            cells[: name + 1] = [Text("")] * (name + 1)
        below = _below(cells, heads, widths)
        for text in _beside(cells, widths, right, console):
            console.print(text, style=look, no_wrap=True)
        if below:
            console.print(Padding(below, (0, 0, 0, indent), expand=False), style=look)
    console.print()


def _below(cells: list[Text], heads: Sequence[str], widths: Sequence[int]) -> Text | None:
    """Take long notes that do not fit out of their cell, for a line of their own below."""
    if heads[-1] != NOTES or len(cells[-1]) <= max(LONG_NOTE, widths[-1]):
        return None
    below, cells[-1] = cells[-1], Text("")
    return below


def _beside(
    cells: Sequence[Text],
    widths: Sequence[int],
    right: Sequence[bool],
    console: Console,
    *,
    low: bool = False,
) -> Iterable[Text]:
    """Yield the lines of a row: its cells beside each other; ``low``: aligned at the bottom."""
    wrapped = [
        list(cell.wrap(console, width, justify="right" if number else "left", overflow="fold"))
        for cell, width, number in zip(cells, widths, right, strict=True)
    ]
    high = max(map(len, wrapped))
    for place, lines in enumerate(wrapped):
        blank = [Text(" " * widths[place])] * (high - len(lines))
        wrapped[place] = blank + lines if low else lines + blank
    for parts in zip(*wrapped, strict=True):
        text = Text(" " * GAP).join(parts)
        text.rstrip()
        yield Text.assemble(" ", text)


def _stack(grid: Grid, console: Console) -> None:
    """Print a paragraph for each row: its name, then every other cell with its head."""
    name = _name_at(grid.heads)
    for line, marks in zip(grid.lines, grid.marks, strict=True):
        look = next((look for word, look in LOOKS if word in marks), "bold")
        console.print(Text(line[name], look), highlight=False)
        pairs = [
            f"{head} {cell}".strip()
            for i, (head, cell) in enumerate(zip(grid.heads, line, strict=True))
            if i != name and cell not in ("", units.NONE)
        ]
        for text in packed(pairs, console.width - 2):
            console.print(Padding(Text(text), (0, 0, 0, 2), expand=False), highlight=False)
    console.print()


def packed(pairs: Sequence[str], width: int) -> list[str]:
    """Return ``pairs``, as many on a line as fit; a longer one has its own line."""
    lines: list[str] = []
    for pair in pairs:
        if lines and len(lines[-1]) + 2 + len(pair) <= width:
            lines[-1] += f"  {pair}"
        else:
            lines.append(pair)
    return lines


def _tell_flags(grid: Grid, left: Sequence[str], console: Console) -> None:
    """Print the cells of hidden flag columns by row, so that no warning is lost."""
    name = _name_at(grid.heads)
    for head, kind, *cells in zip(grid.heads, grid.kinds, *grid.lines, strict=True):
        for line, cell in zip(grid.lines, cells, strict=True):
            if head in left and kind == "flag" and cell not in ("", units.NONE):
                text = f"{escape(line[name])}: {escape(cell)}"
                console.print(Padding(text, (0, 0, 0, 1), expand=False), highlight=False)

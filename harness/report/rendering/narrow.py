"""A table in a terminal of any width: nothing is cut. Columns of least worth give way and are
named, and where too few would be left, each row becomes a paragraph that has them all."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.report.data.grid import Grid
from harness.report.figures import units

if TYPE_CHECKING:
    from rich.console import Console


ROOMY = 100
"""Columns of a terminal from which on every column of a short table has room."""
FOLD, NARROW_FOLD = 22, 18
"""Characters of a recipe on a line: what the numbers leave of 100 columns, and of 80."""
FOLDED = ("Recipe", "What was added")
"""Heads of columns of recipes."""
LEAST_WORTH = ("Step ms", "vs ref %", "Notes", "#", "Old GiB", "Grad norm", "Loss", "Limit %")
"""Heads of columns that give way first, in this order; then the others, the last one first."""
LOOKS = (("alarm", "bold red"), ("front", "cyan"), ("reference", "bold"))
GAP = 2
"""Blanks that a column takes beside its own width."""
LONG_WORD = 24
"""Characters of a word of prose from which on it is broken rather than that a column gives way."""
Styles = Mapping[str, Mapping[str, str]]
"""Head -> cell -> how it looks."""


def print_grid(
    grid: Grid,
    console: Console,
    *,
    least_worth: Sequence[str] = LEAST_WORTH,
    stays: Sequence[str] = (),
    styles: Styles | None = None,
) -> None:
    """A table; recipes fold rather than push the numbers off the screen.

    Args:
        least_worth: heads of columns that give way first where there is no room for all.
        stays: heads of columns that never give way.
    """
    fold = FOLD if console.width >= ROOMY else NARROW_FOLD
    lines = [_folded(grid.heads, line, fold) for line in grid.lines]
    least = [_least(*column) for column in _columns(grid, lines)]
    order = [i for i in _order(grid.heads, least_worth) if grid.heads[i] not in stays]
    kept = fitting(least, order, console.width)
    if 2 * len(kept) < len(grid.heads):
        _stack(grid, console)
        return
    _table(grid, lines, kept, console, styles or {})
    left = [head for index, head in enumerate(grid.heads) if index not in kept]
    if left:
        text = f"No room for {', '.join(left)}: a wider terminal, or COLUMNS in a log, shows more."
        console.print(Padding(Text(text, "dim"), (0, 0, 0, 1), expand=False))
        _tell_flags(grid, left, console)


def fitting(least: Sequence[int], order: Sequence[int], width: int) -> list[int]:
    """Indices of the columns that have room beside each other.

    Args:
        least: the least width of each column.
        order: indices of those that may give way, the first to go first.
    """
    kept, waiting = list(range(len(least))), list(order)
    while waiting and sum(least[i] + GAP for i in kept) > width:
        kept.remove(waiting.pop(0))
    if sum(least[i] + GAP for i in kept) > width:
        return []
    return kept


def folded(recipe: str, width: int = FOLD) -> str:
    """A long recipe on several lines, broken between its parts, and in a long part before its
    parameters, rather than in a word."""
    lines = [""]
    for part in re.split(r"(?<=[+ ])", recipe):
        for piece in [part] if len(part) <= width else re.split(r"(?<=[:,])", part):
            if lines[-1] and len(lines[-1]) + len(piece) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(lines)


# ---- columns ----


def _columns(grid: Grid, lines: Sequence[Sequence[str]]) -> list[tuple[str, bool, list[str]]]:
    """Head, whether it may break between words, and cells of each column."""
    return [
        (head, kind in units.TEXT and head not in FOLDED, list(cells))
        for head, kind, *cells in zip(grid.heads, grid.kinds, *lines, strict=True)
    ]


def _least(head: str, prose: bool, cells: Sequence[str]) -> int:
    """What a column cannot do with less than: numbers and recipes do not break, prose does."""
    if prose:
        return min(LONG_WORD, _longest(w for c in (head, *cells) for w in c.split()))
    return _longest([*head.split(), *cells])


def _natural(head: str, prose: bool, cells: Sequence[str]) -> int:
    """The width at which nothing of it breaks."""
    return _longest((head, *cells))


def _longest(cells: Iterable[str]) -> int:
    return max((len(part) for cell in cells for part in cell.split("\n")), default=1)


def _order(heads: Sequence[str], least_worth: Sequence[str]) -> list[int]:
    """Columns but the one that says which row it is, the first to give way first."""
    name = next((i for i, head in enumerate(heads) if head in FOLDED), 0)
    first = [heads.index(head) for head in least_worth if head in heads]
    rest = [i for i in reversed(range(len(heads))) if i not in first]
    return [i for i in (*first, *rest) if i != name]


def _widths(columns: Sequence[tuple[str, bool, list[str]]], width: int) -> list[int]:
    """Each column's own width: its least, and of what room is left as much as it has use for: prose
    first, for it breaks in every row, and the narrowest wish first."""
    widths = [_least(*column) for column in columns]
    room = width - sum(w + GAP for w in widths)
    wishes = [_natural(*column) - w for column, w in zip(columns, widths, strict=True)]
    waiting = [i for i, wish in enumerate(wishes) if wish > 0]
    waiting.sort(key=lambda i: (not columns[i][1], wishes[i]))
    for place, index in enumerate(waiting):
        more = min(wishes[index], room // (len(waiting) - place))
        widths[index] += more
        room -= more
    return widths


# ---- drawing ----


def _table(
    grid: Grid,
    lines: Sequence[Sequence[str]],
    kept: Sequence[int],
    console: Console,
    styles: Styles,
) -> None:
    columns = [_columns(grid, lines)[i] for i in kept]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for (head, _, _), width, i in zip(columns, _widths(columns, console.width), kept, strict=True):
        numbers = grid.kinds[i] not in units.TEXT
        broken = numbers and len(head) > width
        table.add_column(
            "\n".join(textwrap.wrap(head, width)) if broken else head,
            justify="right" if numbers else "left",
            overflow="fold",
            width=width,
        )
    for line, marks in zip(lines, grid.marks, strict=True):
        look = next((look for word, look in LOOKS if word in marks), None)
        cells = [Text(line[i], styles.get(grid.heads[i], {}).get(line[i], "")) for i in kept]
        table.add_row(*cells, style=look)
    console.print(table)


def _stack(grid: Grid, console: Console) -> None:
    """A paragraph a row: its name, and below it every other cell with its head."""
    name = next((i for i, head in enumerate(grid.heads) if head in FOLDED), 0)
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
    """``pairs``, as many on a line as have room there; one that is longer has its own."""
    lines: list[str] = []
    for pair in pairs:
        if lines and len(lines[-1]) + 2 + len(pair) <= width:
            lines[-1] += f"  {pair}"
        else:
            lines.append(pair)
    return lines


def _tell_flags(grid: Grid, left: Sequence[str], console: Console) -> None:
    """What stands in columns of words that gave way, row by row: a warning must not go unread."""
    name = next((i for i, head in enumerate(grid.heads) if head in FOLDED), 0)
    for index, (head, kind) in enumerate(zip(grid.heads, grid.kinds, strict=True)):
        if head not in left or kind != "flag":
            continue
        for line in grid.lines:
            if line[index] not in ("", units.NONE):
                text = f"{escape(line[name])}: {escape(line[index])}"
                console.print(Padding(text, (0, 0, 0, 1), expand=False), highlight=False)


def _folded(heads: Sequence[str], line: Sequence[str], width: int) -> list[str]:
    return [folded(c, width) if h in FOLDED else c for h, c in zip(heads, line, strict=True)]

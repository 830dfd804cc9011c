"""The report in a terminal of 100 columns: the ranking, the answers, what did not finish."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from harness.report import stories
from harness.report.data import parity, speed, units
from harness.report.data.answers import answers, fastest_that_fits
from harness.report.data.compare import Comparison
from harness.report.data.grid import Grid
from harness.report.data.rows import Group, Report, Unfinished
from harness.report.rendering import comparison, memory_only, recorded, sentences, tables

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["draw", "folded", "render", "render_comparison"]

ROOMY = 100
"""Columns of a terminal from which on every column of a short table has room."""
FOLD, NARROW_FOLD = 22, 18
"""Characters of a recipe on a line: what the numbers leave of 100 columns, and of 80."""
FOLDED = ("Recipe", "What was added")
"""Heads of columns of recipes."""
LOOKS = (("alarm", "bold red"), ("front", "cyan"), ("reference", "bold"))


def render(report: Report, console: Console) -> None:
    """Print it; without a terminal rich leaves colours out by itself."""
    console.print(f"[bold]Headroom: {escape(report.suite.name or 'report')}[/bold]")
    console.print(escape(sentences.summary(report)))
    if sentences.predicted_fits(report):
        console.print(escape(sentences.predicted_fits(report)), highlight=False)
    for grid in stories.tables(report):
        console.print(f"\n[bold]{escape(grid.title)}[/bold]")
        draw(grid, console)
        console.print(escape(grid.note), style="dim", highlight=False)
    for group in report.groups:
        _group(group, console)
    if report.memory_only:
        console.print(escape(memory_only.sentence(report)), highlight=False)
    if report.recorded:
        console.print(escape(recorded.sentence(report)), highlight=False)
    if report.unfinished:
        console.print("\n[bold]Did not finish[/bold]")
        for unfinished in report.unfinished:
            _unfinished(unfinished, console)
    for line in report.skipped:
        console.print(f"[yellow]skipped[/yellow] {escape(line)}")


def render_comparison(compared: Comparison, console: Console) -> None:
    """Print what changed between two result sets."""
    console.print(comparison.summary(compared))
    console.print(escape(compared.basis), highlight=False)
    if compared.environment:
        draw(comparison.environment_grid(compared), console)
    if compared.changes:
        draw(comparison.changes_grid(compared, narrow=console.width < ROOMY), console)
        console.print(comparison.NOTE, style="dim")
    for line in comparison.leftovers(compared):
        console.print(escape(line))


def _group(group: Group, console: Console) -> None:
    console.print(f"\n[bold]{escape(sentences.setting(group))}[/bold]")
    if group.unlike:
        console.print(f"Not ranked with the rows above: {escape(group.unlike)}.")
    look = "yellow" if group.meter != "cuda" else "dim"
    console.print(f"[{look}]{escape(sentences.stamp(group))}[/{look}]")
    if speed.noise_floor(group):
        console.print(escape(speed.noise_floor(group).replace(speed.NONE_SEEN, speed.ALIKE)))
    draw(tables.short_ranking(group, narrow=console.width < ROOMY), console)
    for answer in answers(group):
        name = f"[cyan]{escape(answer.row.label)}[/cyan]: " if answer.row else ""
        line = f"[bold]{answer.question}[/bold]  {name}{escape(answer.text)}"
        console.print(Padding(line, (0, 0, 0, 1), expand=False))
    errors = sentences.prediction_errors(group)
    if errors:
        console.print(Padding(escape(errors), (0, 0, 0, 1), expand=False), highlight=False)
    for fit in fastest_that_fits(group):
        name = escape(fit.row.label) if fit.row else "nothing that was measured"
        console.print(f" {fit.sizes} GiB: {name}{escape(fit.others)}", highlight=False)
    for text in sentences.warnings(group):
        console.print(f"[red]{escape(text)}[/red]" if parity.alarming(text) else escape(text))


def draw(grid: Grid, console: Console) -> None:
    """A table; recipes fold rather than push the numbers off the screen."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    fold = FOLD if console.width >= ROOMY else NARROW_FOLD
    lines = [_folded(grid.heads, line, fold) for line in grid.lines]
    tight = _width(grid, lines) > console.width
    for head, kind in zip(grid.heads, grid.kinds, strict=True):
        right = kind not in units.TEXT
        side = "right" if right else "left"
        # Where room is short heads break, and prose; numbers and recipes never do in a word.
        title = head.replace(" ", "\n") if tight and right else head
        # A recipe is folded already: rich must not take it for what may give way, or it cuts off
        # the last columns.
        table.add_column(title, justify=side, no_wrap=right or head in FOLDED, overflow="fold")
    for line, marks in zip(lines, grid.marks, strict=True):
        look = next((look for word, look in LOOKS if word in marks), None)
        table.add_row(*map(escape, line), style=look)
    console.print(table)


def _folded(heads: Sequence[str], line: Sequence[str], width: int) -> list[str]:
    return [folded(c, width) if h in FOLDED else c for h, c in zip(heads, line, strict=True)]


def _longest(cells: Iterable[str]) -> int:
    return max((len(part) for cell in cells for part in cell.split("\n")), default=1)


def _width(grid: Grid, lines: Sequence[Sequence[str]]) -> int:
    """Columns that the table takes if prose alone breaks, two spaces between."""
    total = 0
    for head, kind, *cells in zip(grid.heads, grid.kinds, *lines, strict=True):
        prose = kind in units.TEXT and head not in FOLDED
        column = (head, *cells)
        total += 2 + _longest([w for c in column for w in c.split()] if prose else column)
    return total


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


def _unfinished(unfinished: Unfinished, console: Console) -> None:
    """One row that did not finish: what is known of it, a line each."""
    grid = tables.unfinished_grid([unfinished])
    facts = dict(zip(grid.heads, grid.lines[0], strict=True))
    name, status = escape(facts.pop("Recipe")), facts.pop("Status")
    console.print(f" [bold]{name}[/bold]  [red]{status}[/red]", highlight=False)
    for head, cell in facts.items():
        console.print(
            Padding(f"{head}: {escape(cell)}", (0, 0, 0, 3), expand=False), highlight=False
        )

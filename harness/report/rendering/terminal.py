"""The report in a terminal: the ranking, the answers, what did not finish."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.padding import Padding

from harness.report import stories
from harness.report.data import speed
from harness.report.data.answers import MANY, answers, fastest_that_fits, in_full
from harness.report.data.compare import Comparison
from harness.report.data.rows import Group, Report, Unfinished
from harness.report.figures import parity
from harness.report.rendering import comparison, memory_only, recorded, sentences, tables
from harness.report.rendering.narrow import folded, print_grid

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["folded", "print_grid", "render", "render_comparison"]


def render(report: Report, console: Console) -> None:
    """Print it; without a terminal rich leaves colours out by itself."""
    console.print(f"[bold]Headroom: {escape(report.suite.name or 'report')}[/bold]")
    console.print(escape(sentences.summary(report)))
    if sentences.predicted_fits(report):
        console.print(escape(sentences.predicted_fits(report)), highlight=False)
    for grid in stories.tables(report):
        console.print(f"\n[bold]{escape(grid.title)}[/bold]")
        print_grid(grid, console)
        console.print(escape(grid.note), style="dim", highlight=False)
    groups = in_full(report.groups)
    for group, shown in groups:
        _group(group, shown, console)
    if text := sentences.others(report, len(groups)):
        console.print(f"\n{escape(text)}", style="red" if parity.alarming(text) else "dim")
    if report.memory_only:
        console.print(escape(memory_only.sentence(report)), highlight=False)
    if report.recorded:
        console.print(escape(recorded.sentence(report)), highlight=False)
    if report.unfinished:
        console.print("\n[bold]Did not finish[/bold]")
        listed = report.unfinished[:MANY]
        for unfinished in listed:
            _unfinished(unfinished, console)
        console.print(sentences.left_out(len(listed), len(report.unfinished)), end="")
    for line in sentences.first_of(report.skipped, "skipped files"):
        console.print(f"[yellow]skipped[/yellow] {escape(line)}")


def render_comparison(compared: Comparison, console: Console) -> None:
    """Print what changed between two result sets."""
    console.print(comparison.summary(compared))
    console.print(escape(compared.basis), highlight=False)
    if compared.environment:
        print_grid(comparison.environment_grid(compared), console)
    if compared.changes:
        print_grid(comparison.changes_grid(comparison.shown(compared)), console)
        console.print(comparison.NOTE, style="dim")
    for line in comparison.leftovers(compared):
        console.print(escape(line), highlight=False)


def _group(group: Group, shown: Group, console: Console) -> None:
    console.print(f"\n[bold]{escape(sentences.setting(group))}[/bold]")
    if group.unlike:
        console.print(f"Not ranked with the rows above: {escape(group.unlike)}.")
    look = "yellow" if group.meter != "cuda" else "dim"
    console.print(f"[{look}]{escape(sentences.stamp(group))}[/{look}]")
    if speed.noise_floor(group):
        console.print(escape(speed.noise_floor(group).replace(speed.NONE_SEEN, speed.ALIKE)))
    if group.asked:
        console.print(f"[bold red]{escape(sentences.stand_in(group))}[/bold red]")
    print_grid(tables.short_ranking(shown), console)
    if shown is not group:
        console.print(sentences.detailed(group, shown), style="dim", highlight=False)
    for answer in answers(group):
        name = f"[cyan]{escape(answer.row.label)}[/cyan]: " if answer.row else ""
        line = f"[bold]{answer.question}[/bold]  {name}{escape(answer.text)}"
        console.print(Padding(line, (0, 0, 0, 1), expand=False))
    for text in filter(None, (sentences.prediction_errors(group), sentences.calibration(group))):
        console.print(Padding(escape(text), (0, 0, 0, 1), expand=False), highlight=False)
    for fit in fastest_that_fits(group):
        name = escape(fit.row.label) if fit.row else "nothing that was measured"
        console.print(f" {fit.sizes} GiB: {name}{escape(fit.others)}", highlight=False)
    for text in sentences.warnings(group):
        if text != sentences.stand_in(group):  # said above the table
            console.print(f"[red]{escape(text)}[/red]" if parity.alarming(text) else escape(text))


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

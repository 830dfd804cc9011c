"""The report and the comparison in a terminal: ranking, answers, unfinished rows and changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.padding import Padding

from harness.report.data import lookup
from harness.report.data.answers import MANY, answers, fastest_that_fits, headline, in_full
from harness.report.data.compare import Comparison
from harness.report.data.grid import Column, tabulate, text_grid
from harness.report.data.rows import Group, Report, Unfinished
from harness.report.rendering import sentences, tables
from harness.report.rendering.table import print_grid

if TYPE_CHECKING:
    from rich.console import Console


MOST_NOTES = 3
"""Notes on a group that are printed; report.md has all."""


def render(report: Report, console: Console) -> None:
    """Print the report. Without a terminal, rich leaves out colours."""
    name = f"[bold]Headroom: {escape(report.suite.name or 'report')}[/bold]"
    console.print(f"{name}: {escape(sentences.summary(report))}")
    if sentences.predicted_fits(report):
        console.print(escape(sentences.predicted_fits(report)), highlight=False)
    groups = in_full(report.groups)
    for group, shown in groups:
        _group(group, shown, console)
    wrong = sentences.others_wrong(report, len(groups))
    if text := sentences.others(report, len(groups)):
        console.print(f"\n{escape(text)}", style="red" if wrong else "dim")
    if text := sentences.recorded(report):
        console.print(escape(text), highlight=False)
    if report.unfinished:
        console.print("\n[bold]Did not finish[/bold]")
        listed = report.unfinished[:MANY]
        for unfinished in listed:
            _unfinished(unfinished, console)
        console.print(sentences.left_out(len(listed), len(report.unfinished)), end="")
    for line in sentences.first_of(report.skipped, "skipped files"):
        console.print(f"[yellow]skipped[/yellow] {escape(line)}")


def _group(group: Group, shown: Group, console: Console) -> None:
    console.print()
    if text := headline(group):
        console.print(escape(text), style="bold", highlight=False)
    console.print(escape(sentences.setting(group)), style="dim", highlight=False)
    if group.unlike:
        console.print(f"Not ranked with the rows above: {escape(group.unlike)}.")
    if group.asked:
        console.print(f"[bold red]{escape(sentences.stand_in(group))}[/bold red]")
    print_grid(tables.ranking(shown), console)
    for answer in answers(group):
        name = f"[cyan]{escape(answer.row.label)}[/cyan]: " if answer.row else ""
        line = f"[bold]{answer.question}[/bold]  {name}{escape(answer.text)}"
        console.print(Padding(line, (0, 0, 0, 1), expand=False))
    for fit in fastest_that_fits(group):
        name = escape(fit.row.label) if fit.row else "nothing that was measured"
        console.print(f" {fit.sizes} GiB: {name}{escape(fit.others)}", highlight=False)
    for text in sentences.wrong_rows(group):
        console.print(f"[red]{escape(text)}[/red]")
    _notes(group, shown, console)


def _notes(group: Group, shown: Group, console: Console) -> None:
    """Print the first notes on a group, and the number of the others."""
    told = (sentences.stamp(group), lookup.noise_floor(group), *sentences.notes(group))
    notes = list(filter(None, (*told, sentences.detailed(group, shown))))
    look = "yellow" if group.meter != "cuda" else "dim"
    for text in notes[:MOST_NOTES]:
        console.print(escape(text), style=look if text == told[0] else None, highlight=False)
    if len(notes) > MOST_NOTES:
        more = f"More notes ({len(notes) - MOST_NOTES}): report.md"
        console.print(more, style="dim", highlight=False)


def _unfinished(unfinished: Unfinished, console: Console) -> None:
    """Print one unfinished row, a line for each fact."""
    grid = tables.unfinished_grid([unfinished])
    facts = dict(zip(grid.heads, grid.lines[0], strict=True))
    name, status = escape(facts.pop("Recipe")), facts.pop("Status")
    console.print(f" [bold]{name}[/bold]  [red]{status}[/red]", highlight=False)
    for head, cell in facts.items():
        console.print(
            Padding(f"{head}: {escape(cell)}", (0, 0, 0, 3), expand=False), highlight=False
        )


NOTE = (
    "A row has changed if its median step moved by more than Limit %, the noise from run to run. "
    "Without a known limit: by more than 5 %, and the p10 to p90 intervals do not overlap. Memory "
    "has changed from 2 % or 16 MiB. Losses, gradient norms and updates have changed if rounding "
    "does not explain it. Read on: docs/explanation/noise-and-fairness.md."
)


COLUMNS = (
    Column("Recipe", lambda c: c.label),
    Column("Old ms", lambda c: c.old_step_seconds, "ms"),
    Column("New ms", lambda c: c.new_step_seconds, "ms"),
    Column("Step x", lambda c: c.step_ratio, "ratio"),
    Column("Limit %", lambda c: c.step_limit_fraction, "percent"),
    Column("Old GiB", lambda c: c.old_need_bytes, "gib"),
    Column("New GiB", lambda c: c.new_need_bytes, "gib"),
    Column("Memory %", lambda c: c.need_change_fraction, "change"),
    Column("Loss", lambda c: c.loss_distance, "distance"),
    Column("Grad norm", lambda c: c.grad_norm_distance, "distance"),
    Column("Changed", lambda c: c.words or f"still {c.new_status}".replace("still ok", ""), "flag"),
)


def render_comparison(compared: Comparison, console: Console) -> None:
    """Print the changes between two result sets; of many rows, only the first changed ones."""
    rows, crowded = compared.changes, len(compared.changes) > MANY
    counts = f"{len(rows)} rows in both sets, {len(compared.changed)} changed"
    counts += f" (the table has at most {MANY} of these)" if crowded else ""
    same = "Same environment."
    if compared.environment:
        same = "Not the same environment: read the differences first."
    console.print(f"{counts} beyond noise. {same}", style="bold", highlight=False)
    if compared.environment:
        kinds = dict.fromkeys(("Differs", "Old", "New"), "text")
        facts = [list(fact) for fact in compared.environment]
        print_grid(text_grid("environment", "Environment", kinds, facts), console)
    if rows:
        shown = compared.changed[:MANY] if crowded else rows
        marks = [("alarm",) if change.words else () for change in shown]
        print_grid(tabulate("compare", "Rows", COLUMNS, shown, marks=marks), console)
        console.print(NOTE, style="dim", highlight=False)
    console.print(escape(compared.basis), style="dim", highlight=False)
    for side, names in (("old", compared.only_old), ("new", compared.only_new)):
        if names:
            console.print(escape(f"only in the {side} set: {_recipes(names)}"), highlight=False)
    for what, recipes in compared.unlike.items():
        line = f"in both sets, but not the same run ({what}): {', '.join(recipes)}"
        console.print(escape(line), highlight=False)
    for line in sentences.first_of(compared.skipped, "skipped files"):
        console.print(escape(f"skipped: {line}"), highlight=False)


def _recipes(names: Sequence[str]) -> str:
    """Return the recipes of these rows, with a count if several rows have the same."""
    counts = Counter(name.split(" ")[0] for name in names)
    return ", ".join(
        recipe if count == 1 else f"{recipe} ({count} rows)" for recipe, count in counts.items()
    )

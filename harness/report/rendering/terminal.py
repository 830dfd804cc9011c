"""The report and the comparison in a terminal: ranking, answers, unfinished rows and changes."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from typing import TYPE_CHECKING, Any

from harness.report.data.compare import Comparison
from harness.report.data.grid import Column, tabulate
from harness.report.data.rows import Report
from harness.report.figures import units
from harness.report.rendering import sentences
from harness.report.rendering.pages import content
from harness.report.rendering.sentences import MANY
from harness.report.rendering.table import print_grid

if TYPE_CHECKING:
    from rich.console import Console


MOST_NOTES = 2
"""Notes on a group that are printed; report.md has all."""


def escape(text: str) -> str:
    """Return ``text`` for rich's markup. Only what prints imports rich."""
    from rich import markup

    return markup.escape(text)


def render(report: Report, console: Console) -> None:
    """Print the report. Without a terminal, rich leaves out colours."""
    from rich.padding import Padding

    context = content(report)
    console.print(f"[bold]{escape(context['title'])}[/bold]: {escape(context['summary'])}")
    for group in context["groups"]:
        _group(group, console)
    if context["left_out"]:
        console.print(f"\n{escape(context['left_out'])}", style="yellow")
    if context["recorded"]:
        names = sentences.some([name for name, _ in context["recorded"]])
        console.print(escape(f"Recorded, not ranked: {names}."), highlight=False)
    grid = context["unfinished"]
    if grid.lines:
        console.print("\n[bold]Did not finish[/bold]")
    for line in grid.lines:
        console.print(f" [bold]{escape(line[0])}[/bold]  [red]{line[1]}[/red]", highlight=False)
        for head, cell in zip(grid.heads[2:], line[2:], strict=True):
            if cell != units.NONE:
                fact = Padding(f"{head}: {escape(cell)}", (0, 0, 0, 3), expand=False)
                console.print(fact, highlight=False)
    for line in context["skipped"]:
        console.print(f"[yellow]skipped[/yellow] {escape(line)}")


def _group(group: dict[str, Any], console: Console) -> None:
    from rich.padding import Padding

    console.print()
    if group["headline"]:
        console.print(escape(group["headline"]), style="bold", highlight=False)
    console.print(escape(group["setting"]), style="dim", highlight=False)
    if group["unlike"]:
        console.print(f"Not ranked with the rows above: {escape(group['unlike'])}.")
    for text in group["errors"]:
        console.print(f"[bold red]{escape(text)}[/bold red]")
    grid = group["ranking"]
    print_grid(dataclasses.replace(grid, lines=grid.lines[:MANY], marks=grid.marks[:MANY]), console)
    for question, row, text in group["answers"]:
        name = f"[cyan]{escape(row)}[/cyan]: " if row else ""
        line = f"[bold]{question}[/bold]  {name}{escape(text)}"
        console.print(Padding(line, (0, 0, 0, 1), expand=False))
    for size, name, _ in group["fits"].lines:
        console.print(f" from {size} GiB: {escape(name)}", highlight=False)
    look = "dim" if group["gpu"] else "yellow"
    console.print(escape(group["stamp"]), style=look, highlight=False)
    notes = list(filter(None, (group["floor"], *group["notes"])))
    for text in notes[:MOST_NOTES]:
        console.print(escape(text), highlight=False)
    if len(notes) > MOST_NOTES:
        more = f"More notes ({len(notes) - MOST_NOTES}): report.md"
        console.print(more, style="dim", highlight=False)


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
        heads = enumerate(("Differs", "Old", "New"))
        columns = [Column(head, operator.itemgetter(place)) for place, head in heads]
        print_grid(tabulate("environment", "", columns, compared.environment), console)
    if rows:
        shown = compared.changed[:MANY] if crowded else rows
        marks = [("alarm",) if change.words else () for change in shown]
        print_grid(tabulate("compare", "Rows", COLUMNS, shown, marks=marks), console)
        console.print(NOTE, style="dim", highlight=False)
    console.print(escape(compared.basis), style="dim", highlight=False)
    for side, names in (("old", compared.only_old), ("new", compared.only_new)):
        often = Counter(name.split(" ")[0] for name in names)
        listed = ", ".join(n if many == 1 else f"{n} ({many} rows)" for n, many in often.items())
        if names:
            console.print(escape(f"only in the {side} set: {listed}"), highlight=False)
    for what, recipes in compared.unlike.items():
        line = f"in both sets, but not the same run ({what}): {', '.join(recipes)}"
        console.print(escape(line), highlight=False)
    for line in sentences.first_of(compared.skipped, "skipped files"):
        console.print(escape(f"skipped: {line}"), highlight=False)

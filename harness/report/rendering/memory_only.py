"""Rows that ran side by side in a report: their memory, and no time. In no answer about speed."""

from __future__ import annotations

from harness.report.data.grid import Column, Grid, tabulate
from harness.report.data.rows import Report, label
from harness.report.figures import derive
from harness.report.rendering import html_parts
from harness.report.rendering.markdown_parts import table_lines
from harness.report.rendering.sentences import some

__all__ = ["grid", "html", "markdown", "sentence"]

TITLE = "Memory only"
NOTE = (
    "Measured side by side, each on a GPU of its own (--side-by-side): memory only. Their times "
    "would be of the company they had, and are not kept. To rank them, run them without it."
)
COLUMNS = (
    Column("Recipe", lambda r: label(r.spec)),
    Column("Peak GiB", lambda r: derive.peak_of(r.ranks), "gib"),
    Column("Needs GiB", lambda r: derive.need_bytes(r.ranks, r.meter), "gib"),
    Column("Beside", lambda r: r.beside - 1, "count"),
)


def grid(report: Report) -> Grid:
    """The rows, the one that needs least first."""
    rows = sorted(report.memory_only, key=lambda r: derive.need_bytes(r.ranks, r.meter) or 0)
    return tabulate("memory_only", TITLE, COLUMNS, rows, note=NOTE)


def sentence(report: Report) -> str:
    """Which rows, and what they need; empty without one."""
    if not report.memory_only:
        return ""
    needs = [
        f"{label(r.spec)} {(derive.need_bytes(r.ranks, r.meter) or 0) / 2**30:.2f} GiB"
        for r in report.memory_only
    ]
    return f"Memory only, measured side by side, never ranked: {some(needs)}."


def html(report: Report) -> str:
    """A section of the page."""
    if not report.memory_only:
        return ""
    note = html_parts.tag("p", NOTE, "note")
    return html_parts.section("memory-only", TITLE, note, html_parts.table(grid(report)))


def markdown(report: Report) -> list[str]:
    """Lines of the Markdown report."""
    if not report.memory_only:
        return []
    return [f"## {TITLE}", "", NOTE, "", *table_lines(grid(report)), ""]

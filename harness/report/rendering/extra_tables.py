"""Unranked runs in a report: recorded ones with key averages and files, and memory-only ones."""

from __future__ import annotations

from html import escape

from harness.report.data.answers import MANY
from harness.report.data.grid import Column, Grid, tabulate
from harness.report.data.rows import Report, label
from harness.report.figures import derive
from harness.report.rendering import parts as html_parts
from harness.report.rendering.parts import code, table_lines
from harness.report.rendering.sentences import some
from harness.result import Result

NOTE = (
    "Recorded with --profile or --snapshot: the recording costs time and memory, so these runs are "
    "not ranked. Open *.pt.trace.json.gz in Perfetto (ui.perfetto.dev), chrome://tracing or "
    "TensorBoard, snapshot.rank*.pickle in pytorch.org/memory_viz."
)
AVERAGES = (
    Column("Operation", lambda r: r["name"]),
    Column("Calls", lambda r: r["calls"], "count"),
    Column("Own CPU ms", lambda r: r["self_cpu_seconds"], "ms"),
    Column("Own device ms", lambda r: r["self_device_seconds"] or None, "ms"),
    Column("CPU MiB, net", lambda r: r["cpu_bytes"], "mib"),
    Column("Device MiB, net", lambda r: r["device_bytes"] or None, "mib"),
)


def sentence(report: Report) -> str:
    """Return a sentence on the recorded runs; empty without one."""
    names = some([label(result.spec) for result in report.recorded])
    return f"Recorded, not ranked: {names}." if names else ""


def html(report: Report) -> str:
    """Return the section of the page."""
    if not report.recorded:
        return ""
    parts = [html_parts.tag("p", NOTE, "note")]
    for result in report.recorded[:MANY]:
        parts.append(html_parts.tag("h3", label(result.spec)))
        files = "<br>".join(f"<code>{escape(str(name))}</code>" for name in result.recordings)
        parts.append(f"<p>{files}</p>")
        if result.key_averages:
            parts.append(html_parts.table(_averages(result)))
    parts += [html_parts.tag("p", line) for line in _more(report)]
    return html_parts.section("recorded", "Recorded runs, not ranked", *parts)


def markdown(report: Report) -> list[str]:
    """Return the lines of the Markdown report."""
    if not report.recorded:
        return []
    lines = ["## Recorded runs, not ranked", "", NOTE, ""]
    for result in report.recorded[:MANY]:
        files = [f"- {code(name)}" for name in result.recordings]
        lines += [f"### {code(label(result.spec))}", "", *files, ""]
        if result.key_averages:
            lines += [*table_lines(_averages(result)), ""]
    return lines + _more(report)


def _more(report: Report) -> list[str]:
    """Return a line on the recorded runs that are not listed."""
    count = len(report.recorded) - MANY
    return [f"{count} more recorded runs, which are not listed here."] if count > 0 else []


def _averages(result: Result) -> Grid:
    return tabulate("averages", "Key averages of three steps", AVERAGES, result.key_averages)


# ---- memory-only rows ----
# Rows that ran side by side have no comparable times.


TITLE = "Memory only"
MEMORY_ONLY_NOTE = (
    "Measured side by side, each on its own GPU (--side-by-side), for memory only. Their "
    "times would depend on the rows beside them, and are not kept. To rank these rows, "
    "run them without it."
)
COLUMNS = (
    Column("Recipe", lambda r: label(r.spec)),
    Column("Peak GiB", lambda r: derive.peak_of(r.ranks), "gib"),
    Column("Needs GiB", lambda r: derive.need_bytes(r.ranks, r.meter), "gib"),
    Column("Beside", lambda r: r.beside - 1, "count"),
)


def grid(report: Report) -> Grid:
    """Return the rows, the smallest need first."""
    rows = sorted(report.memory_only, key=lambda r: derive.need_bytes(r.ranks, r.meter) or 0)
    return tabulate("memory_only", TITLE, COLUMNS, rows, note=MEMORY_ONLY_NOTE)


def sentence_of_memory_only(report: Report) -> str:
    """Return the rows and their needs in a sentence; empty without one."""
    if not report.memory_only:
        return ""
    needs = [
        f"{label(r.spec)} {(derive.need_bytes(r.ranks, r.meter) or 0) / 2**30:.2f} GiB"
        for r in report.memory_only
    ]
    return f"Memory only, measured side by side, never ranked: {some(needs)}."


def html_of_memory_only(report: Report) -> str:
    """Return the section of the page."""
    if not report.memory_only:
        return ""
    note = html_parts.tag("p", MEMORY_ONLY_NOTE, "note")
    return html_parts.section("memory-only", TITLE, note, html_parts.table(grid(report)))


def markdown_of_memory_only(report: Report) -> list[str]:
    """Return the lines of the Markdown report."""
    if not report.memory_only:
        return []
    return [f"## {TITLE}", "", MEMORY_ONLY_NOTE, "", *table_lines(grid(report)), ""]

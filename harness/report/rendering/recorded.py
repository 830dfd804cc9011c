"""Recorded runs in a report: their key averages, and where their files are. Never ranked."""

from __future__ import annotations

from html import escape

from harness.report.data.answers import MANY
from harness.report.data.grid import Column, Grid, tabulate
from harness.report.data.rows import Report, label
from harness.report.rendering import html_parts
from harness.report.rendering.markdown_parts import code, table_lines
from harness.report.rendering.sentences import some
from harness.result import Result

__all__ = ["html", "markdown", "sentence"]

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
    """Which runs were recorded; empty without one."""
    names = some([label(result.spec) for result in report.recorded])
    return f"Recorded, not ranked: {names}." if names else ""


def html(report: Report) -> str:
    """A section of the page."""
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
    """Lines of the Markdown report."""
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
    """A line on the recorded runs that are not listed."""
    count = len(report.recorded) - MANY
    return [f"{count} more recorded runs, which are not listed here."] if count > 0 else []


def _averages(result: Result) -> Grid:
    return tabulate("averages", "Key averages of three steps", AVERAGES, result.key_averages)

"""Recorded runs in a report: their key averages and where their files are; never ranked."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from harness.report import html_parts, table
from harness.report.columns import Column
from harness.report.rows import Report, label
from harness.result import Result

__all__ = ["html", "markdown", "note"]

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


def _averages(result: Result) -> table.Grid:
    return table.grid("averages", "Key averages of three steps", AVERAGES, result.key_averages)


def note(report: Report) -> str:
    """One sentence on the recorded runs; empty without one."""
    names = ", ".join(label(result.spec) for result in report.recorded)
    return f"Recorded, not ranked: {names}." if names else ""


def html(report: Report) -> str:
    """A section of the page."""
    if not report.recorded:
        return ""
    parts = [html_parts.tag("p", NOTE, "note")]
    for result in report.recorded:
        parts.append(html_parts.tag("h3", label(result.spec)))
        parts.append(f"<p>{_files(result.recordings)}</p>")
        if result.key_averages:
            parts.append(html_parts.grid(_averages(result)))
    return html_parts.section("recorded", "Recorded runs, not ranked", *parts)


def _files(names: Sequence[Any]) -> str:
    return "<br>".join(f"<code>{escape(str(name))}</code>" for name in names)


def markdown(report: Report, lines_of: Any) -> list[str]:
    """Lines of the Markdown report; ``lines_of`` draws a table."""
    if not report.recorded:
        return []
    lines = ["## Recorded runs, not ranked", "", NOTE, ""]
    for result in report.recorded:
        lines += [f"### `{label(result.spec)}`", "", *(f"- `{f}`" for f in result.recordings), ""]
        if result.key_averages:
            lines += [*lines_of(_averages(result)), ""]
    return lines

"""Analyses in a report: tables and charts of a suite's rows together, shown before the ranking.

A suite names its analysis (``story: ladder``), and an extension registers it. Without that
extension, or without a name, there are none.
"""

from __future__ import annotations

from harness import extensions
from harness.extensions import Analysis
from harness.report.data.grid import Grid
from harness.report.data.rows import Report
from harness.report.rendering.charts import line_style


def analysis_of(report: Report) -> Analysis | None:
    """Return the analysis of the report's suite; None if none is installed under its name."""
    return extensions.analyses().get(report.suite.story)


def tables(report: Report) -> list[Grid]:
    """Return the tables of the suite's analysis, in the order in which they are shown."""
    found = analysis_of(report)
    return extensions.load(found.tables)(report) if found else []


def charts(report: Report) -> list[tuple[str, str, str]]:
    """Return (caption, small print, SVG) of each chart; none for an analysis without charts."""
    found = analysis_of(report)
    return extensions.load(found.charts)(report) if found and found.charts else []


def keys(report: Report) -> list[tuple[str, str, str]]:
    """Return the label, colour and dash of each recipe's line in the charts."""
    found = analysis_of(report)
    recipes = extensions.load(found.lines)(report) if found and found.lines else ()
    return [(recipe, *line_style(index)) for index, recipe in enumerate(recipes)]

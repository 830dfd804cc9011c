"""The pictures of a story, beside its tables: how memory and work grow with depth."""

from __future__ import annotations

from harness.report.data import units
from harness.report.data.rows import Report
from harness.report.rendering.charts import line_style
from harness.report.rendering.svg import WIDTH, Scale, axes, drawing, element, polyline
from harness.report.stories import depth

__all__ = ["keys", "pictures"]

Lines = dict[str, list[tuple[int, float]]]
"""Recipe -> (depth, value) of its points."""


def pictures(report: Report) -> list[tuple[str, str, str]]:
    """(caption, small print, SVG) of each picture; none for a story that has none."""
    points_of = depth.series(report) if report.suite.story == "depth" else {}
    if not points_of:
        return []
    small = "one step; both axes logarithmic"
    memory = {r: [(p.depth, p.beyond / units.MIB) for p in line] for r, line in points_of.items()}
    work = {r: depth.work(line) for r, line in points_of.items()}
    seconds = {r: [(p.depth, p.seconds) for p in line] for r, line in points_of.items()}
    return [
        ("Memory beyond the state", small, _chart(memory, "MiB")),
        (
            "Forward passes of blocks",
            f"{small}; equal ones lie on one line",
            _chart(work, "block forwards"),
        ),
        ("Seconds a step", small, _chart(seconds, "seconds")),
    ]


def keys(report: Report) -> list[tuple[str, str, str]]:
    """Label, colour and dash of each recipe's line in the pictures."""
    recipes = depth.series(report) if report.suite.story == "depth" else ()
    return [(recipe, *line_style(index)) for index, recipe in enumerate(recipes)]


def _chart(lines: Lines, name: str) -> str:
    every = [point for points in lines.values() for point in points]
    if not every:
        return ""
    depths, values = zip(*every, strict=True)
    marks = tuple(sorted(set(depths)))
    x = Scale(marks[0] * 0.9, marks[-1] * 1.1, 56.0, WIDTH - 10, log=True, marks=marks)
    y = Scale(min(values) * 0.8, max(values) * 1.25, 220.0, 26.0, log=True)
    parts = axes(x, y, "blocks", name, y.end)
    for index, (recipe, points) in enumerate(lines.items()):
        colour, dash = line_style(index)
        spots = [(x(d), y(v)) for d, v in points]
        if not spots:
            continue
        tip = element("title", recipe)
        look = {"stroke": colour, "stroke_dasharray": dash or None, "class_": "curve"}
        parts.append(element("path", tip, d=polyline(spots), **look))
        parts += [element("circle", cx=a, cy=b, r=2.5, fill=colour) for a, b in spots]
    return drawing(WIDTH, 260, parts, f"{name} against depth")

"""The story of a suite that varies depth: how memory and work of each recipe grow with it."""

from __future__ import annotations

from harness.presets import shape_of
from harness.report import claims, units
from harness.report.charts import style_of
from harness.report.lookup import Missing, state_bytes, step_bytes
from harness.report.rows import Report, Row
from harness.report.svg import WIDTH, Scale, axes, drawing, element
from harness.report.table import Grid

__all__ = ["charts", "keys", "tables"]

Series = dict[str, list[tuple[int, float]]]


def tables(report: Report) -> list[Grid]:
    """One line a recipe: memory beyond the state at each depth, and the fitted powers."""
    memory, seconds = series(report)
    depths = sorted({d for points in memory.values() for d, _ in points})
    lines = []
    for recipe, points in memory.items():
        found = dict(points)
        cells = units.column("mib", [found.get(d) for d in depths])
        lines.append([recipe, *cells, _power(points), _power(seconds[recipe])])
    heads = {"Recipe": "text", **{f"{d} blocks, MiB": "mib" for d in depths}}
    heads |= {"Memory ~ L^": "ratio", "Step time ~ L^": "ratio"}
    return [
        Grid(
            key="depth",
            title="Memory and work against depth",
            heads=list(heads),
            kinds=list(heads.values()),
            lines=lines,
            marks=[() for _ in lines],
            note="Memory of one step beyond parameters, gradients, optimizer state and average. "
            "Powers: least squares through the logarithms; what does not depend on depth "
            "(embeddings, the loss) flattens them at small depths.",
        )
    ]


def charts(report: Report) -> list[tuple[str, str, str]]:
    """(caption, small print, picture): memory and step time against depth, logarithmic."""
    memory, seconds = series(report)
    if not memory:
        return []
    return [
        ("Memory beyond the state", "both axes logarithmic", _lines(memory, "MiB", 2**-20)),
        ("Seconds a step", "both axes logarithmic", _lines(seconds, "seconds", 1.0)),
    ]


def keys(report: Report) -> list[tuple[str, str, str]]:
    """Label, colour and dash of each recipe's line."""
    return [(recipe, *style_of(i)) for i, recipe in enumerate(series(report)[0])]


def series(report: Report) -> tuple[Series, Series]:
    """Recipe -> (depth, bytes beyond the state) and (depth, seconds a step), by depth."""
    rows = [row for group in report.groups for row in group.rows]
    order = {recipe: place for place, recipe in enumerate(report.suite.order)}
    rows = sorted(rows, key=lambda r: (order.get(r.spec.recipe, len(order)), _depth(r)))
    memory: Series = {}
    seconds: Series = {}
    for row in rows:
        try:
            beyond = step_bytes(row) - state_bytes(row)
        except Missing:
            continue
        memory.setdefault(row.spec.recipe, []).append((_depth(row), beyond))
        median = row.numbers.step_seconds_median
        seconds.setdefault(row.spec.recipe, []).append((_depth(row), median))
    return memory, seconds


def _depth(row: Row) -> int:
    return shape_of(row.spec.model).depth


def _power(points: list[tuple[int, float]]) -> str:
    if len(points) < 2:
        return units.NONE
    return units.one("ratio", claims.power(*zip(*points, strict=True)))


def _lines(found: Series, name: str, scale: float) -> str:
    every = [(d, v * scale) for points in found.values() for d, v in points]
    depths, values = zip(*every, strict=True)
    x = Scale(min(depths) * 0.9, max(depths) * 1.1, 56.0, WIDTH - 10, log=True)
    y = Scale(min(values) * 0.8, max(values) * 1.25, 220.0, 26.0, log=True)
    parts = axes(x, y, "blocks", name, y.end)
    for index, (recipe, points) in enumerate(found.items()):
        colour, dash = style_of(index)
        spots = [(x(d), y(v * scale)) for d, v in points]
        path = "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in spots)
        tip = element("title", recipe)
        look = {"stroke": colour, "stroke_dasharray": dash or None, "class_": "curve"}
        parts.append(element("path", tip, d=path, **look))
        parts += [element("circle", cx=a, cy=b, r=2.5, fill=colour) for a, b in spots]
    return drawing(WIDTH, 260, parts, f"{name} against depth")

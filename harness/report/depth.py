"""The story of a suite that varies depth: how memory and work of each recipe grow with it."""

from __future__ import annotations

from dataclasses import dataclass

from harness.presets import shape_of
from harness.report import claim_rules, units
from harness.report.charts import style_of
from harness.report.lookup import Missing, beyond_state
from harness.report.rows import Report, Row
from harness.report.svg import WIDTH, Scale, axes, drawing, element
from harness.report.table import Grid

__all__ = ["charts", "keys", "tables"]

NOTE = (
    "L: blocks. Memory: the most that one step held at once beyond parameters, gradients, "
    "optimizer state and average. Added by a block: between the two deepest models. Powers: "
    "least squares through the logarithms; one block's own activations, which every regime "
    "computes, and what does not depend on depth flatten them. Forwards a block: counted in one "
    "step, in the least and in the deepest model; times the blocks it is the work of the forward "
    "passes."
)
Series = dict[str, list[tuple[int, float]]]


@dataclass(frozen=True)
class Point:
    """One model of a recipe's line: bytes beyond the state, seconds a step, forwards a block."""

    depth: int
    beyond: float
    seconds: float
    forwards: float | None


def tables(report: Report) -> list[Grid]:
    """One line a recipe: memory beyond the state at each depth, how it grows, and the work."""
    found = series(report)
    depths = sorted({p.depth for points in found.values() for p in points})
    columns = [_memory_at(depth, found) for depth in depths]
    columns.append(units.column("mib", [_added(points) for points in found.values()]))
    lines = [
        [recipe, *cells, *_growth(found[recipe])]
        for recipe, *cells in zip(found, *columns, strict=True)
    ]
    heads = {"Recipe": "text", **{f"L={d} MiB": "mib" for d in depths}}
    heads |= {"Added by a block MiB": "mib", "Memory ~ L^": "ratio", "Forwards a block": "text"}
    heads |= {"Forward work ~ L^": "ratio", "Step time ~ L^": "ratio"}
    return [
        Grid(
            key="depth",
            title="Memory and work against depth",
            heads=list(heads),
            kinds=list(heads.values()),
            lines=lines,
            marks=[() for _ in found],
            note=NOTE,
        )
    ]


def _memory_at(depth: int, found: dict[str, list[Point]]) -> list[str]:
    """The cells of one depth: each recipe's MiB, or a dash."""
    tables = [{p.depth: p.beyond for p in points} for points in found.values()]
    return units.column("mib", [table.get(depth) for table in tables])


def _growth(points: list[Point]) -> list[str]:
    return [
        _power([(p.depth, p.beyond) for p in points]),
        _span([p.forwards for p in points]),
        _power(_work(points)),
        _power([(p.depth, p.seconds) for p in points]),
    ]


def _added(points: list[Point]) -> float | None:
    """Bytes that each block adds, from the two deepest models."""
    if len(points) < 2:
        return None
    low, high = points[-2:]
    return (high.beyond - low.beyond) / (high.depth - low.depth)


def _span(values: list[float | None]) -> str:
    ends = list(dict.fromkeys(units.one("ratio", v) for v in (values[0], values[-1])))
    return " to ".join(ends)


def _work(points: list[Point]) -> list[tuple[int, float]]:
    """Forward passes of a block in one step, all blocks together."""
    return [(p.depth, p.depth * p.forwards) for p in points if p.forwards]


def _power(points: list[tuple[int, float]]) -> str:
    if len(points) < 2:
        return units.NONE
    return units.one("ratio", claim_rules.power(*zip(*points, strict=True)))


def charts(report: Report) -> list[tuple[str, str, str]]:
    """(caption, small print, picture): memory and work against depth, logarithmic."""
    found = series(report)
    if not found:
        return []
    small = "one step; both axes logarithmic"
    memory = {r: [(p.depth, p.beyond / units.MIB) for p in line] for r, line in found.items()}
    work = {r: _work(line) for r, line in found.items()}
    seconds = {r: [(p.depth, p.seconds) for p in line] for r, line in found.items()}
    return [
        ("Memory beyond the state", small, _lines(memory, "MiB")),
        (
            "Forward passes of blocks",
            f"{small}; equal ones lie on one line",
            _lines(work, "block forwards"),
        ),
        ("Seconds a step", small, _lines(seconds, "seconds")),
    ]


def keys(report: Report) -> list[tuple[str, str, str]]:
    """Label, colour and dash of each recipe's line."""
    return [(recipe, *style_of(i)) for i, recipe in enumerate(series(report))]


def series(report: Report) -> dict[str, list[Point]]:
    """Recipe, in the suite's order -> its points, by depth."""
    rows = [row for group in report.groups for row in group.rows]
    order = {recipe: place for place, recipe in enumerate(report.suite.order)}
    found: dict[str, list[Point]] = {}
    for row in sorted(rows, key=lambda r: (order.get(r.spec.recipe, len(order)), _depth(r))):
        try:
            beyond = beyond_state(row)
        except Missing:
            continue
        median = row.numbers.step_seconds_median
        point = Point(_depth(row), beyond, median, _forwards(row))
        found.setdefault(row.spec.recipe, []).append(point)
    return found


def _depth(row: Row) -> int:
    return shape_of(row.spec.model).depth


def _forwards(row: Row) -> float | None:
    """Forward passes of a block in one step: one where nothing is recomputed; None: not known."""
    facts = row.first.evidence.get("checkpoint")
    return 1.0 if facts is None else facts.get("block_forwards")


def _lines(found: Series, name: str) -> str:
    every = [point for points in found.values() for point in points]
    if not every:
        return ""
    depths, values = zip(*every, strict=True)
    marks = tuple(sorted(set(depths)))
    x = Scale(marks[0] * 0.9, marks[-1] * 1.1, 56.0, WIDTH - 10, log=True, marks=marks)
    y = Scale(min(values) * 0.8, max(values) * 1.25, 220.0, 26.0, log=True)
    parts = axes(x, y, "blocks", name, y.end)
    for index, (recipe, points) in enumerate(found.items()):
        colour, dash = style_of(index)
        spots = [(x(d), y(v)) for d, v in points]
        if not spots:
            continue
        path = "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in spots)
        tip = element("title", recipe)
        look = {"stroke": colour, "stroke_dasharray": dash or None, "class_": "curve"}
        parts.append(element("path", tip, d=path, **look))
        parts += [element("circle", cx=a, cy=b, r=2.5, fill=colour) for a, b in spots]
    return drawing(WIDTH, 260, parts, f"{name} against depth")

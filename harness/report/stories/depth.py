"""The story "depth": how memory and work of each recipe grow with the number of blocks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from harness.report.data.grid import Grid, text_grid
from harness.report.data.lookup import Missing, beyond_state
from harness.report.data.rows import Report, Row
from harness.report.figures import derive, units
from harness.report.figures.floor import Floor, Runs, swing
from harness.subjects.dit.presets import shape_of

__all__ = ["Point", "memory_at", "power", "series", "tables", "time_power", "work"]

NOTE = (
    "L: blocks. Memory: the most that one step held at once beyond parameters, gradients, "
    "optimizer state and average. Added by a block: between the two deepest models. Powers: "
    "least squares through the logarithms; one block's own activations, which every regime "
    "computes, and what does not depend on depth flatten them. Forwards a block: counted in one "
    "step, in the least and in the deepest model; times the blocks it is the work of the forward "
    "passes. Behind +-: how far the noise floor lets the power of time lie from it, where a row "
    "was measured more than once."
)


@dataclass(frozen=True)
class Point:
    """One row of a recipe: ``at`` how many blocks (in another story: tokens), bytes beyond the
    state, seconds a step, forward passes of a block in one step (None: not known); its timed steps,
    and the noise floor of its group."""

    at: int
    beyond: float
    seconds: float
    forwards: float | None
    runs: Runs = ()
    floor: Floor | None = None


def tables(report: Report) -> list[Grid]:
    """One line a recipe: memory beyond the state at each depth, how it grows, and the work."""
    points_of = series(report)
    depths = sorted({p.at for points in points_of.values() for p in points})
    columns = [memory_at(depth, points_of) for depth in depths]
    columns.append(units.column("mib", [_added(points) for points in points_of.values()]))
    lines = [
        [recipe, *cells, *_growth(points_of[recipe])]
        for recipe, *cells in zip(points_of, *columns, strict=True)
    ]
    kinds = {"Recipe": "text", **{f"L={d} MiB": "mib" for d in depths}}
    kinds |= {"Added by a block MiB": "mib", "Memory ~ L^": "ratio", "Forwards a block": "text"}
    kinds |= {"Forward work ~ L^": "ratio", "Step time ~ L^": "text"}
    return [text_grid("depth", "Memory and work against depth", kinds, lines, NOTE)]


def memory_at(depth: int, points_of: dict[str, list[Point]]) -> list[str]:
    """The cells of one depth: each recipe's MiB, or a dash."""
    beyond = [{p.at: p.beyond for p in points} for points in points_of.values()]
    return units.column("mib", [by_depth.get(depth) for by_depth in beyond])


def _growth(points: list[Point]) -> list[str]:
    return [
        power([(p.at, p.beyond) for p in points]),
        _span([p.forwards for p in points]),
        power(work(points)),
        time_power(points),
    ]


def _added(points: list[Point]) -> float | None:
    """Bytes that each block adds, from the two deepest models."""
    if len(points) < 2:
        return None
    low, high = points[-2:]
    return (high.beyond - low.beyond) / (high.at - low.at)


def _span(values: list[float | None]) -> str:
    """From the least to the deepest model; one number where they are equal."""
    ends = list(dict.fromkeys(units.one("ratio", v) for v in (values[0], values[-1])))
    return " to ".join(ends)


def work(points: list[Point]) -> list[tuple[int, float]]:
    """(depth, forward passes of all blocks in one step) of each point where they are known."""
    return [(p.at, p.at * p.forwards) for p in points if p.forwards]


def power(points: list[tuple[int, float]]) -> str:
    """The power of depth that a value grows with; a dash for a single model."""
    if len(points) < 2:
        return units.NONE
    return units.one("ratio", derive.power(*zip(*points, strict=True)))


def time_power(points: list[Point]) -> str:
    """The power that a step's seconds grow with, and how far the noise lets it lie from there."""
    found = power([(p.at, p.seconds) for p in points])
    floors = [p.floor for p in points]
    if len(points) < 2 or None in floors:
        return found
    logs = [math.log(p.at) for p in points]
    middle = statistics.fmean(logs)
    square = sum((x - middle) ** 2 for x in logs)
    # The slope is a sum of the logarithms of the seconds, by these weights.
    weighted = [((x - middle) / square, p.runs) for x, p in zip(logs, points, strict=True)]
    spread = max(swing(floor, weighted) for floor in floors)
    return f"{found} +- {units.one('ratio', spread)}"


def series(report: Report, at: Callable[[Row], int] | None = None) -> dict[str, list[Point]]:
    """Recipe, in the suite's order -> its points, by what ``at`` says (None: by depth); without
    rows that were not traced."""
    at = at or _depth
    rows = [row for group in report.groups for row in group.rows]
    order = {recipe: place for place, recipe in enumerate(report.suite.order)}
    points_of: dict[str, list[Point]] = {}
    for row in sorted(rows, key=lambda r: (order.get(r.spec.recipe, len(order)), at(r))):
        try:
            beyond = beyond_state(row)
        except Missing:
            continue
        median = row.numbers.step_seconds_median
        point = Point(at(row), beyond, median, _forwards(row), row.runs, row.floor)
        points_of.setdefault(row.spec.recipe, []).append(point)
    return points_of


def _depth(row: Row) -> int:
    return shape_of(row.spec.model).depth


def _forwards(row: Row) -> float | None:
    """Forward passes of a block in one step: one where nothing is recomputed; None: not counted."""
    facts = row.first.evidence.get("checkpoint")
    return 1.0 if facts is None else facts.get("block_forwards")

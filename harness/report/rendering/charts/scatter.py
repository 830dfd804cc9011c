"""Memory against throughput: the chart in which a recipe is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from harness.report.data.rows import Group, Row
from harness.report.figures import units
from harness.report.rendering.charts.svg import (
    LINE,
    WIDTH,
    Box,
    Point,
    Scale,
    axes,
    element,
    padded,
    picture,
    place_labels,
    text,
    width_of,
)

__all__ = ["scatter"]

THREAD_FROM = 17
"""A label this far from its mark, in pixels, needs a thread to it."""


def scatter(group: Group) -> str:
    """Memory against throughput; the rows of the front filled and joined."""
    rows = [row for row in group.rows if row.numbers.need_bytes is not None]
    if not rows:
        return ""
    # As high as the bars beside it, which have a line for each row.
    top, bottom = 26.0, max(300.0, LINE * len(rows) - 10)
    memory = [row.numbers.need_bytes / units.GIB for row in rows]
    speed = [row.numbers.samples_per_second for row in rows]
    x = Scale(*padded(memory, 0.12), 48.0, WIDTH - 10)
    y = Scale(*padded(speed, 0.12), bottom, top)
    points = [(x(m), y(s)) for m, s in zip(memory, speed, strict=True)]
    front = [p for p, row in zip(points, rows, strict=True) if row.versus.front]
    parts = axes(x, y, f"{word(group.meter)} of the fullest device, GiB", "samples/s", top)
    parts += _steps_of_front(front)
    frame = (x.start, top - 4, WIDTH, bottom - 2)
    parts += _labelled_points(rows, points, frame, _stair_boxes(front))
    return picture(WIDTH, bottom + 40, parts, "Memory against samples a second")


def word(meter: str) -> str:
    """What rows are ranked by: what a device must have free, or the peak without a GPU."""
    return "need" if meter == "cuda" else "peak"


def _labelled_points(
    rows: Sequence[Row], points: list[Point], frame: Box, taken: list[Box]
) -> list[str]:
    """Marks with names where there is room for one, and ranks where there is none."""
    order = sorted(range(len(rows)), key=lambda i: (not rows[i].versus.front, i))
    at = [points[i] for i in order]
    names = [rows[i].label for i in order]
    spots = place_labels(at, names, frame, taken)
    placed = [
        (s[0], s[1] - 11, s[0] + width_of(n), s[1] + 3)
        for s, n in zip(spots, names, strict=True)
        if s
    ]
    ranks = [str(rows[i].versus.place) for i in order]
    bare = [k for k, spot in enumerate(spots) if spot is None]
    numbers = place_labels(
        [at[k] for k in bare], [ranks[k] for k in bare], frame, [*taken, *placed, *_dots(at)]
    )
    for k, spot in zip(bare, numbers, strict=True):
        names[k], spots[k] = ranks[k], spot
    return [
        _point(at[k], rows[i], names[k], spots[k] or (at[k][0] + 8, at[k][1] + 4))
        for k, i in enumerate(order)
    ]


def _dots(points: list[Point]) -> list[Box]:
    """The marks themselves, a little inside their edge."""
    return [(x - 4, y - 4, x + 4, y + 4) for x, y in points]


def _steps_of_front(front: list[Point]) -> list[str]:
    """The front as a staircase: left of it and above it, nothing was measured."""
    ordered = sorted(front)
    if not ordered:
        return []
    path = f"M{ordered[0][0]:.1f},{ordered[0][1]:.1f}"
    path += "".join(f"H{x:.1f}V{y:.1f}" for x, y in ordered[1:])
    return [element("path", d=path, class_="front-line")]


def _stair_boxes(front: list[Point]) -> list[Box]:
    """The room that the staircase takes, for labels to keep out of."""
    boxes = []
    for (x0, y0), (x1, y1) in pairwise(sorted(front)):
        boxes.append((x0, y0 - 1, x1, y0 + 1))
        boxes.append((x1 - 1, min(y0, y1), x1 + 1, max(y0, y1)))
    return boxes


def _point(at: Point, row: Row, label: str, spot: Point) -> str:
    """A row's mark and label; a far label gets a thread to its mark."""
    alarm = row.versus.wrong
    kind = "front" if row.versus.front else "alarm" if alarm else "behind"
    shape = element("circle", _tip(row), cx=at[0], cy=at[1], r=5, class_=f"dot {kind}")
    if row.versus.is_reference:
        shape = element("circle", cx=at[0], cy=at[1], r=8.5, class_="ring") + shape
    left, base = spot
    thread = ""
    middle = min(max(at[0], left), left + width_of(label))
    if math.hypot(middle - at[0], base - 4 - at[1]) > THREAD_FROM:
        near = base - 11 if base - 4 > at[1] else base + 2
        thread = element("line", x1=at[0], y1=at[1], x2=middle, y2=near, class_="thread")
    if left < at[0] and base - 4 > at[1] - 17 and left + width_of(label) < at[0]:
        # Ends at its mark whatever the font's true widths are.
        look = f"label {kind} end"
        return thread + shape + text(left + width_of(label), base, label, class_=look)
    return thread + shape + text(left, base, label, class_=f"label {kind}")


def _tip(row: Row) -> str:
    speed = units.one("rate", row.numbers.samples_per_second)
    size = units.gib(row.numbers.need_bytes)
    facts = f"{row.label}: {speed} samples/s, {word(row.first.meter)} {size}"
    return element("title", facts.replace("<", "&lt;"))

"""Charts of one group's rows: peaks, losses, step times, and memory by throughput."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from harness.report.data.rows import Group, Row
from harness.report.figures import derive, units
from harness.report.figures.units import ALL_CATEGORIES, title
from harness.report.rendering.svg import (
    COLOURS,
    DASHES,
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
    polyline,
    ruler,
    text,
    width_of,
)

STACK = (*ALL_CATEGORIES, "untraced")
COLOUR_OF = dict(
    zip(
        STACK,
        ("#0072b2", "#d55e00", "#e69f00", "#cc79a7", "#009e73", "#56b4e9", "#8c6d31", "#c4c4c4"),
        strict=True,
    )
)
"""Category, or untraced bytes -> its colour in every chart."""


def of_group(group: Group) -> dict[str, Any]:
    """Return the pictures of a group's page, and the keys of their colours; no row, no picture."""
    return {
        "scatter": scatter(group),
        "split": split_bars(group),
        "split_keys": split_legend(group),
        "steps": steps(group),
        "losses": curves(group),
        "line_keys": legend(group),
    }


def _label_width(rows: Sequence[Row]) -> float:
    return min(max(width_of(row.label, 11.5) for row in rows) + 12, WIDTH * 0.42)


def _row_label(row: Row, right: float, base: float) -> str:
    """Return a row's name left of its bar, cut to the space; its tooltip has the whole name."""
    room = int(right / width_of("x", 11.5))
    short = row.label if len(row.label) <= room else f"{row.label[: room - 2]}.."
    tip = element("title", escape(row.label))
    return element("text", tip + escape(short), x=right, y=base, class_="label end")


def split_bars(group: Group) -> str:
    """Draw the measured peak of each row, stacked by category."""
    rows = [row for row in group.rows if row.numbers.parameters_bytes is not None]
    if not rows:
        return ""
    totals = [sum(_size(row, name) for name in STACK) for row in rows]
    left, top = _label_width(rows), 8.0
    bottom = top + LINE * len(rows)
    x = Scale(0.0, max(totals) / units.GIB or 1.0, left, WIDTH - 52)
    parts = ruler(x, top, bottom)
    for index, (row, shown) in enumerate(zip(rows, units.column("gib", totals), strict=True)):
        parts += _split_bar(row, top + LINE * index, x, shown)
    parts.append(text((left + WIDTH - 52) / 2, bottom + 31, "GiB", class_="axis mid"))
    return picture(WIDTH, bottom + 38, parts, "Peak memory by category")


def _split_bar(row: Row, top: float, x: Scale, shown: str) -> list[str]:
    sizes = {name: _size(row, name) / units.GIB for name in STACK}
    tips = {name: units.gib(size * units.GIB) for name, size in sizes.items()}
    bar = stacked(sizes, tips, x, (top + 4, LINE - 8))
    end = text(x(sum(sizes.values())) + 6, top + 16, shown, class_="value")
    return [_row_label(row, x.start - 8, top + 16), *bar, end]


def stacked(
    sizes: Mapping[str, float], tips: Mapping[str, str], x: Scale, place: tuple[float, float]
) -> list[str]:
    """Return a horizontal bar of parts, in the colours of their categories.

    ``place`` is the bar's top and height; ``tips`` are the tooltips behind the parts' names.
    """
    parts, before = [], 0.0
    for name, size in sizes.items():
        wide = x(before + size) - x(before)
        if wide > 0:
            box = {"x": x(before), "y": place[0], "width": wide, "height": place[1]}
            tip = element("title", f"{title(name)}: {tips[name]}")
            parts.append(element("rect", tip, **box, fill=COLOUR_OF[name], class_="part"))
        before += size
    return parts


def _size(row: Row, name: str) -> int:
    """Return the bytes of one part of the bar, at least 0.

    On a CPU, untraced bytes are not part of the peak.
    """
    if name == "untraced" and row.first.meter != "cuda":
        return 0
    return max(0, getattr(row.numbers, f"{name}_bytes") or 0)


def split_legend(group: Group) -> list[tuple[str, str]]:
    """Return the name and colour of each category, in the order of the stack.

    Other models and untraced bytes are left out if no row has any.
    """
    rows, always = group.rows, ALL_CATEGORIES[:-1]
    names = [n for n in STACK if n in always or any(_size(row, n) for row in rows)]
    return [(title(name), COLOUR_OF[name]) for name in names]


def line_style(index: int) -> tuple[str, str]:
    """Return the colour and dash of the ``index``-th line: colours first, then dashes."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]


def legend(group: Group) -> list[tuple[str, str, str]]:
    """Return the label, colour and dash of each row's line."""
    return [(row.label, *line_style(index)) for index, row in enumerate(group.rows)]


def curves(group: Group) -> str:
    """Draw the loss of each step, warm-up first; the reference is thick and behind the others."""
    lines = [row.first.losses for row in group.rows]
    shown = [v for line in lines for v in line if math.isfinite(v)]
    if not shown:
        return ""
    y = Scale(*padded(shown), 220.0, 26.0)
    parts = _lines(group, lines, y, "loss")
    return picture(WIDTH, 260, parts, "Loss of each step")


def _lines(group: Group, lines: list[list[float]], y: Scale, name: str) -> list[str]:
    longest = max(len(line) for line in lines)
    x = Scale(1, max(longest, 2), 48.0, WIDTH - 10)
    parts = axes(x, y, "optimizer step, warm-up first", name, y.end)
    paths: list[str] = []
    for index, (row, line) in enumerate(zip(group.rows, lines, strict=True)):
        spots = [(x(i), y(v)) for i, v in enumerate(line, 1) if math.isfinite(v)]
        if not spots:
            continue
        colour, dash = line_style(index)
        is_reference = row.versus.is_reference
        look = {"stroke": colour, "stroke_dasharray": dash or None}
        look["class_"] = "curve home" if is_reference else "curve"
        tip = element("title", row.label.replace("<", "&lt;"))
        curve = element("path", tip, d=polyline(spots), **look)
        # The reference's line is behind the others.
        paths.insert(0 if is_reference else len(paths), curve)
    return parts + paths


def steps(group: Group) -> str:
    """Draw every timed step of each row as a dot, p10 to p90 as a bar, and the median as a tick.

    The band behind them is the noise floor around the reference's median.
    """
    rows = group.rows
    times = [[s * 1e3 for r in row.results for s in derive.step_seconds(r)] for row in rows]
    every = [t for line in times for t in line]
    left, top = _label_width(rows), 8.0
    bottom = top + LINE * len(rows)
    wide = max(every) > 8 * min(every)
    low, high = (min(every) * 0.9, max(every) * 1.1) if wide else padded(every)
    x = Scale(low, high, left, WIDTH - 62, log=wide)
    parts = [*_noise_band(group, x, top, bottom), *ruler(x, top, bottom)]
    medians = units.column("ms", [row.numbers.step_seconds_median for row in rows])
    for index, (row, line) in enumerate(zip(rows, times, strict=True)):
        parts += _strip(row, line, top + LINE * index + LINE / 2, x)
        at = top + LINE * index + 16
        parts.append(text(WIDTH - 4, at, medians[index], class_="value end"))
    name = "step time, ms (logarithmic)" if wide else "step time, ms"
    parts.append(text((left + WIDTH - 62) / 2, bottom + 31, name, class_="axis mid"))
    return picture(WIDTH, bottom + 38, parts, "Step times of each row")


def _noise_band(group: Group, x: Scale, top: float, bottom: float) -> list[str]:
    """Draw the range of medians (ms) that are not separable from the reference's."""
    if group.floor is None:
        return []
    middle, share = group.reference.numbers.step_seconds_median * 1e3, 1 + group.floor.fraction
    left, right = (x(min(max(v, x.low), x.high)) for v in (middle / share, middle * share))
    box = {"x": left, "width": right - left, "y": top, "height": bottom - top}
    tip = element("title", f"noise floor {units.one('percent', group.floor.fraction)} %")
    return [element("rect", tip, **box, class_="noise")]


def _strip(row: Row, line: list[float], middle: float, x: Scale) -> list[str]:
    numbers = row.numbers
    ends = x(numbers.step_seconds_p10 * 1e3), x(numbers.step_seconds_p90 * 1e3)
    box: dict[str, Any] = {"x": ends[0], "width": max(ends[1] - ends[0], 1.5)}
    at = x(numbers.step_seconds_median * 1e3)
    noisy = " noisy" if numbers.noisy else ""
    parts = [_row_label(row, x.start - 8, middle + 4)]
    parts.append(element("rect", **box, y=middle - 6, height=12, class_=f"spread{noisy}"))
    for index, value in enumerate(line):
        # Three alternating heights keep equal times visible as several dots.
        up = (index % 3 - 1) * 3.0
        parts.append(element("circle", cx=x(value), cy=middle + up, r=1.8, class_="sample"))
    parts.append(element("line", x1=at, x2=at, y1=middle - 8, y2=middle + 8, class_="median"))
    return parts


THREAD_FROM = 17
"""Distance in pixels from which a line connects a label to its mark."""


def scatter(group: Group) -> str:
    """Draw memory by throughput; the rows of the front are filled and joined."""
    rows = [row for row in group.rows if row.numbers.need_bytes is not None]
    if not rows:
        return ""
    # As high as the bar chart beside it, which has a line for each row.
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
    """Return the word for the ranked memory: the need on a GPU, the peak without one."""
    return "need" if meter == "cuda" else "peak"


def _labelled_points(
    rows: Sequence[Row], points: list[Point], frame: Box, taken: list[Box]
) -> list[str]:
    """Draw marks, those of the front first, with names where they fit and ranks elsewhere."""
    order = sorted(range(len(rows)), key=lambda i: (not rows[i].versus.front, i))
    at = [points[i] for i in order]
    spots = place_labels(at, [rows[i].label for i in order], frame, taken)
    parts = []
    for i, spot in zip(order, spots, strict=True):
        (x, y), rank = points[i], str(rows[i].versus.place)
        near = (x - width_of(rank) / 2, y - 7)
        parts.append(_point(points[i], rows[i], rows[i].label if spot else rank, spot or near))
    return parts


def _steps_of_front(front: list[Point]) -> list[str]:
    """Draw the front as a staircase: no measured row is left of it and above it."""
    if not front:
        return []
    first, *rest = sorted(front)
    path = f"M{first[0]:.1f},{first[1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in rest)
    return [element("path", d=path, class_="front-line")]


def _stair_boxes(front: list[Point]) -> list[Box]:
    """Return the boxes of the staircase, which labels avoid."""
    boxes = []
    for (x0, y0), (x1, y1) in pairwise(sorted(front)):
        boxes.append((x0, y0 - 1, x1, y0 + 1))
        boxes.append((x1 - 1, min(y0, y1), x1 + 1, max(y0, y1)))
    return boxes


def _point(at: Point, row: Row, label: str, spot: Point) -> str:
    """Draw a row's mark and label; a line connects a distant label."""
    kind = "front" if row.versus.front else "alarm" if row.versus.wrong else "behind"
    speed = units.one("rate", row.numbers.samples_per_second)
    size = f"{word(row.first.meter)} {units.gib(row.numbers.need_bytes)}"
    tip = element("title", f"{row.label}: {speed} samples/s, {size}".replace("<", "&lt;"))
    shape = element("circle", tip, cx=at[0], cy=at[1], r=5, class_=f"dot {kind}")
    if row.versus.is_reference:
        shape = element("circle", cx=at[0], cy=at[1], r=8.5, class_="ring") + shape
    left, base = spot
    thread = ""
    middle = min(max(at[0], left), left + width_of(label))
    if math.hypot(middle - at[0], base - 4 - at[1]) > THREAD_FROM:
        near = base - 11 if base - 4 > at[1] else base + 2
        thread = element("line", x1=at[0], y1=at[1], x2=middle, y2=near, class_="thread")
    if left < at[0] and base - 4 > at[1] - 17 and left + width_of(label) < at[0]:
        # Right-aligned, so it ends at its mark in any font.
        look = f"label {kind} end"
        return thread + shape + text(left + width_of(label), base, label, class_=look)
    return thread + shape + text(left, base, label, class_=f"label {kind}")

"""Charts of one group's rows: peaks, step times, and memory by throughput."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from harness.report.data.rows import Group, Row
from harness.report.figures import derive, units
from harness.report.figures.units import ALL_CATEGORIES, title
from harness.report.rendering.svg import (
    LINE,
    WIDTH,
    Scale,
    axes,
    element,
    padded,
    picture,
    place_labels,
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
    shown = units.column("gib", totals)
    for index, row in enumerate(rows):
        y, before = top + LINE * index, 0
        parts.append(_row_label(row, left - 8, y + 16))
        for name in STACK:
            size = _size(row, name)
            start, end = (x(value / units.GIB) for value in (before, before + size))
            before += size
            if size:
                box = {"x": start, "y": y + 4, "width": end - start, "height": LINE - 8}
                tip = element("title", f"{title(name)}: {units.gib(size)}")
                parts.append(element("rect", tip, **box, fill=COLOUR_OF[name], class_="part"))
        parts.append(text(x(before / units.GIB) + 6, y + 16, shown[index], class_="value"))
    parts.append(text((left + WIDTH - 52) / 2, bottom + 31, "GiB", class_="axis mid"))
    return picture(WIDTH, bottom + 38, parts, "Peak memory by category")


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
    parts = ruler(x, top, bottom)
    if group.floor:
        middle, share = group.reference.numbers.step_seconds_median * 1e3, 1 + group.floor.fraction
        ends = [x(min(max(v, x.low), x.high)) for v in (middle / share, middle * share)]
        box = {"x": ends[0], "width": ends[1] - ends[0], "y": top, "height": bottom - top}
        tip = element("title", f"noise floor {units.one('percent', group.floor.fraction)} %")
        parts.insert(0, element("rect", tip, **box, class_="noise"))
    medians = units.column("ms", [row.numbers.step_seconds_median for row in rows])
    for index, (row, line) in enumerate(zip(rows, times, strict=True)):
        parts += _strip(row, line, top + LINE * index + LINE / 2, x)
        at = top + LINE * index + 16
        parts.append(text(WIDTH - 4, at, medians[index], class_="value end"))
    name = "step time, ms (logarithmic)" if wide else "step time, ms"
    parts.append(text((left + WIDTH - 62) / 2, bottom + 31, name, class_="axis mid"))
    return picture(WIDTH, bottom + 38, parts, "Step times of each row")


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


def scatter(group: Group) -> str:
    """Draw memory by throughput; the rows of the front are filled and joined.

    Marks have names where they fit, those of the front first, and ranks elsewhere.
    """
    rows = [row for row in group.rows if row.numbers.need_bytes is not None]
    if not rows:
        return ""
    rows.sort(key=lambda row: not row.versus.front)
    # As high as the bar chart beside it, which has a line for each row.
    top, bottom = 26.0, max(300.0, LINE * len(rows) - 10)
    memory = [row.numbers.need_bytes / units.GIB for row in rows]
    speed = [row.numbers.samples_per_second for row in rows]
    x = Scale(*padded(memory, 0.12), 48.0, WIDTH - 10)
    y = Scale(*padded(speed, 0.12), bottom, top)
    points = [(x(m), y(s)) for m, s in zip(memory, speed, strict=True)]
    word = "need" if group.meter == "cuda" else "peak"
    parts = axes(x, y, f"{word} of the fullest device, GiB", "samples/s", top)
    front = sorted(p for p, row in zip(points, rows, strict=True) if row.versus.front)
    if front:
        # A staircase: no measured row is left of it and above it.
        steps_up = "".join(f"H{right:.1f}V{up:.1f}" for right, up in front[1:])
        path = f"M{front[0][0]:.1f},{front[0][1]:.1f}{steps_up}"
        parts.append(element("path", d=path, class_="front-line"))
    frame = (x.start, top - 4, WIDTH, bottom - 2)
    spots = place_labels(points, [5.0] * len(rows), [row.label for row in rows], frame)
    for row, (cx, cy), spot in zip(rows, points, spots, strict=True):
        kind = "front" if row.versus.front else "alarm" if row.versus.wrong else "behind"
        pace = units.one("rate", row.numbers.samples_per_second)
        tip = f"{row.label}: {pace} samples/s, {word} {units.gib(row.numbers.need_bytes)}"
        if row.versus.is_reference:
            parts.append(element("circle", cx=cx, cy=cy, r=8.5, class_="ring"))
        mark = element("title", escape(tip))
        parts.append(element("circle", mark, cx=cx, cy=cy, r=5, class_=f"dot {kind}"))
        label, look = row.label, f"label {kind}"
        if spot is None:
            label, spot, look = str(row.versus.place), (cx, cy - 8), f"{look} mid"
        elif spot[0] + width_of(label) < cx:
            # Right-aligned, so it ends at its mark in any font.
            spot, look = (spot[0] + width_of(label), spot[1]), f"{look} end"
        parts.append(text(*spot, label, class_=look))
    return picture(WIDTH, bottom + 40, parts, "Memory against samples a second")

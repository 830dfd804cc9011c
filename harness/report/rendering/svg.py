"""SVG for charts: elements, scales with round ticks, and labels without overlaps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Point = tuple[float, float]
Box = tuple[float, float, float, float]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")
"""Colours of Okabe and Ito, separable by every kind of colour vision; yellow is too pale."""
WIDTH = 600.0
"""Width of every chart."""
LINE = 24.0
"""Height of a row of a bar chart."""
EM = 0.6
"""Mean width of a sans serif character, in ems: enough to keep labels apart."""


def element(tag: str, content: str = "", **attributes: Any) -> str:
    """Return one element; underscores in names become hyphens, None omits an attribute."""
    shown = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{shown}>{content}</{tag}>" if content else f"<{tag}{shown}/>"


def _text(value: Any) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def text(x: float, y: float, words: str, **attributes: Any) -> str:
    """Return text at a point; ``y`` is the baseline."""
    return element("text", escape(words), x=float(x), y=float(y), **attributes)


def picture(width: float, height: float, parts: Sequence[str], title: str) -> str:
    """Return a whole picture; a screen reader reads its title."""
    content = element("title", escape(title)) + "".join(parts)
    box = f"0 0 {_text(float(width))} {_text(float(height))}"
    return element("svg", content, viewBox=box, role="img", xmlns="http://www.w3.org/2000/svg")


def width_of(label: str, size: float = 11) -> float:
    """Return the approximate width of ``label`` at ``size``."""
    return len(label) * size * EM


@dataclass(frozen=True)
class Scale:
    """Maps values from ``low`` to ``high`` to pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self._linear(self.low), self._linear(self.high)
        share = (self._linear(value) - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def _linear(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value

    def ticks(self, count: int = 5) -> list[float]:
        """Return about ``count`` round values of the scale.

        On a logarithmic scale they are powers of ten (all or some). Below three decades they
        are 1, 2 and 5 of each.
        """
        if not self.log:
            span = self.high - self.low
            if span <= 0 or not math.isfinite(span):
                return [self.low]
            rough = span / count
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return [index * step for index in range(first, last + 1)]
        if self.high / self.low < 1000:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)))
            every = [m * 10.0**p for p in powers for m in (1, 2, 5)]
            return [v for v in every if self.low <= v <= self.high]
        low, high = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        return [10.0**p for p in range(low, high + 1, max(1, math.ceil((high - low) / count)))]


def place_labels(
    points: Sequence[Point], radii: Sequence[float], labels: Sequence[str], frame: Box
) -> list[Point | None]:
    """Return the left end and baseline of each label beside its mark, without overlaps.

    The search is greedy, in the given order; None if left, right, above and below are taken.
    """
    marks = zip(points, radii, strict=True)
    used = [(x - r - 1, y - r - 1, x + r + 1, y + r + 1) for (x, y), r in marks]
    spots: list[Point | None] = []
    for (x, y), r, label in zip(points, radii, labels, strict=True):
        wide, spot = width_of(label), None
        # Left first: a staircase of a front comes from below and leaves to the right.
        at_side, over = ((x - r - 5 - wide, y + 4), (x + r + 5, y + 4)), x - wide / 2
        for left, base in (*at_side, (over, y - r - 5), (over, y + r + 15)):
            box = (left - 2, base - 11, left + wide + 2, base + 3)
            inside = frame[0] <= box[0] and box[2] <= frame[2]
            inside = inside and frame[1] <= box[1] and box[3] <= frame[3]
            if inside and not any(
                box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in used
            ):
                spot = (left, base)
                used.append(box)
                break
        spots.append(spot)
    return spots


def axes(x: Scale, y: Scale, x_name: str, y_name: str, top: float) -> list[str]:
    """Return grid lines, tick labels and axis names."""
    left, right, bottom = x.start, x.end, y.start
    parts = []
    for value in y.ticks():
        parts.append(element("line", x1=left, x2=right, y1=y(value), y2=y(value), class_="grid"))
        parts.append(text(left - 6, y(value) + 4, _tick(value, y), class_="tick end"))
    for value in x.ticks(6):
        parts.append(element("line", x1=x(value), x2=x(value), y1=bottom, y2=top, class_="grid"))
        parts.append(text(x(value), bottom + 15, _tick(value, x), class_="tick mid"))
    parts.append(text((left + right) / 2, bottom + 31, x_name, class_="axis mid"))
    parts.append(text(4, top - 9, y_name, class_="axis"))
    return parts


def ruler(x: Scale, top: float, bottom: float) -> list[str]:
    """Return the grid lines and tick labels of a chart of horizontal bars."""
    marks = [(x(value), f"{value:g}") for value in x.ticks()]
    lines = [element("line", x1=at, x2=at, y1=top, y2=bottom, class_="grid") for at, _ in marks]
    return lines + [text(at, bottom + 15, label, class_="tick mid") for at, label in marks]


def _tick(value: float, scale: Scale) -> str:
    if not scale.log or 1e-3 <= value < 1e4:
        return f"{value:g}"
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def padded(values: Sequence[float], share: float = 0.08) -> tuple[float, float]:
    """Return the range of ``values``, wider by ``share`` at both ends, never below zero."""
    low, high = min(values), max(values)
    margin = (high - low or abs(high) or 1.0) * share
    return max(0.0, low - margin), high + margin

"""Statements on a series of measured points: spans in a band, limits, and powers of growth."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.figures import derive

ROUNDING = 1e-9
"""Relative tolerance at the edges of a band."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two sizes at one point of a sweep: ``ours`` and ``base``, at the batch ``at``."""

    at: float
    base: float
    ours: float

    @property
    def saved(self) -> float:
        """The share of ``base`` that ``ours`` saves; negative for a cost."""
        return 1 - self.ours / self.base


@dataclass(frozen=True, kw_only=True)
class Band:
    """Savings from ``least`` to ``most``, with both edges; ``open_above`` excludes ``most``."""

    least: float = -math.inf
    most: float = math.inf
    open_above: bool = False

    def holds(self, pair: Pair) -> bool:
        """Return True if the saving of ``pair`` is in the band."""
        saved = pair.saved
        below = saved < self.most - ROUNDING if self.open_above else saved <= self.most + ROUNDING
        return below and saved >= self.least - ROUNDING


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a sweep, from ``start`` to ``end``.

    ``started`` and ``ended`` are the measured points around the crossed edge (one point twice
    if it is on the edge). They are None if the span reaches the end of the sweep.
    """

    start: float
    end: float
    started: tuple[float, float] | None = None
    ended: tuple[float, float] | None = None


def spans(pairs: Sequence[Pair], band: Band) -> list[Span]:
    """Return the spans in which the saving is in ``band``, in order.

    Both sizes are taken as linear between neighbouring points. A step's peak is the highest of
    many instants, each a fixed size plus bytes per sample. It is thus linear in the batch,
    except where another instant becomes the peak; there the line lies above it. An edge
    therefore lies between its two neighbours, and its position is approximate.
    """
    ordered = sorted(pairs, key=lambda pair: pair.at)
    if len(ordered) < 2:
        return [Span(start=p.at, end=p.at) for p in ordered if band.holds(p)]
    found: list[Span] = []
    for low, high in itertools.pairwise(ordered):
        cuts = [low.at, *_crossings(low, high, band), high.at]
        sides = {cut: (low.at, high.at) for cut in cuts[1:-1]}
        for start, end in itertools.pairwise(cuts):
            if band.holds(_between(low, high, (start + end) / 2)):
                edges = [sides.get(at, (at, at)) for at in (start, end)]
                found.append(Span(start=start, end=end, started=edges[0], ended=edges[1]))
    return [_open(span, ordered[0].at, ordered[-1].at) for span in _joined(found)]


def _open(span: Span, first: float, last: float) -> Span:
    """Remove an edge of a span at the end of the measured points."""
    started = None if span.start == first else span.started
    ended = None if span.end == last else span.ended
    return dataclasses.replace(span, started=started, ended=ended)


def _joined(parts: Sequence[Span]) -> list[Span]:
    """Merge parts that touch."""
    whole: list[Span] = []
    for part in parts:
        if whole and whole[-1].end == part.start:
            last = whole.pop()
            part = dataclasses.replace(part, start=last.start, started=last.started)
        whole.append(part)
    return whole


def _crossings(low: Pair, high: Pair, band: Band) -> list[float]:
    """Return the points between two neighbours that cross an edge of ``band``, in order."""
    found = []
    for level in (band.least, band.most):
        if math.isinf(level):
            continue
        # saved >= level if ours - (1 - level) base <= 0, which is linear in both.
        ends = [pair.ours - (1 - level) * pair.base for pair in (low, high)]
        if ends[0] * ends[1] < 0:
            found.append(low.at + (high.at - low.at) * ends[0] / (ends[0] - ends[1]))
    return sorted(found)


def _between(low: Pair, high: Pair, at: float) -> Pair:
    part = (at - low.at) / (high.at - low.at)
    base, ours = (a + (b - a) * part for a, b in ((low.base, high.base), (low.ours, high.ours)))
    return Pair(at=at, base=base, ours=ours)


# ---- limits and powers ----


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value, and its distance from a second estimate; None without one."""

    value: float
    spread: float | None


def limit(pairs: Sequence[Pair]) -> Estimate | None:
    """Return the saving in the limit of a large base; None if the base does not grow.

    It is one minus the ratio of the slopes of both sizes, from the last two points. The spread
    is the distance to the same estimate from the two points before them.
    """
    ordered = sorted(pairs, key=lambda pair: pair.at)
    last, before = (_slopes(ordered[i:j]) for i, j in ((-2, None), (-3, -1)))
    if last is None:
        return None
    return Estimate(value=last, spread=None if before is None else abs(last - before))


def _slopes(ends: Sequence[Pair]) -> float | None:
    if len(ends) < 2 or ends[1].base <= ends[0].base:
        return None
    return 1 - (ends[1].ours - ends[0].ours) / (ends[1].base - ends[0].base)


@dataclass(frozen=True, kw_only=True)
class Power:
    """The p of y ~ x^p through all points.

    ``spread``: the standard error of the slope in logarithms, None for two points. ``first``
    and ``last``: the power between the first two and the last two points, which shows a curve
    that is no power.
    """

    value: float
    spread: float | None
    first: float
    last: float


def power(x: Sequence[float], y: Sequence[float]) -> Power:
    """Return the power of ``y``, by least squares through the logarithms of two or more points."""
    points = sorted(zip(x, y, strict=True))
    xs, ys = zip(*points, strict=True)
    slope = derive.power(xs, ys)
    first, last = (derive.power(xs[part], ys[part]) for part in (slice(2), slice(-2, None)))
    spread = _standard_error(slope, xs, ys) if len(points) > 2 else None
    return Power(value=slope, spread=spread, first=first, last=last)


def _standard_error(slope: float, x: Sequence[float], y: Sequence[float]) -> float:
    lx, ly = ([math.log(v) for v in values] for values in (x, y))
    mx, my = sum(lx) / len(lx), sum(ly) / len(ly)
    left = sum((b - my - slope * (a - mx)) ** 2 for a, b in zip(lx, ly, strict=True))
    return math.sqrt(left / (len(lx) - 2) / sum((a - mx) ** 2 for a in lx))

"""Statements on a series of measured points: spans in a band, limits, and powers of growth."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

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
    around: dict[float, tuple[float, float] | None] = {p.at: (p.at, p.at) for p in ordered}
    held: list[tuple[float, float]] = []
    for low, high in itertools.pairwise(ordered):
        crossings = _crossings(low, high, band)
        around |= dict.fromkeys(crossings, (low.at, high.at))
        for start, end in itertools.pairwise([low.at, *crossings, high.at]):
            if band.holds(_between(low, high, (start + end) / 2)):
                touches = held and held[-1][1] == start
                held.append((held.pop()[0] if touches else start, end))
    around |= dict.fromkeys((ordered[0].at, ordered[-1].at))
    return [Span(start=a, end=b, started=around[a], ended=around[b]) for a, b in held]


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
    points = sorted((math.log(a), math.log(b)) for a, b in zip(x, y, strict=True))
    lx, ly = zip(*points, strict=True)
    slope, start = statistics.linear_regression(lx, ly)
    first, last = ((ly[i + 1] - ly[i]) / (lx[i + 1] - lx[i]) for i in (0, len(lx) - 2))
    spread = None
    if len(lx) > 2:  # the standard error of the slope
        left = sum((b - start - slope * a) ** 2 for a, b in points) / (len(lx) - 2)
        spread = math.sqrt(left / (len(lx) * statistics.pvariance(lx)))
    return Power(value=slope, spread=spread, first=first, last=last)

"""What a series of measured points says as a whole: where it lies in a band, what it tends to,
and the power it grows with."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.figures import derive

ROUNDING = 1e-9
"""Share of a value within which it counts as on the edge of a band."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two sizes at one point of a sweep: ``ours`` against ``base``, at the batch ``at``."""

    at: float
    base: float
    ours: float

    @property
    def saved(self) -> float:
        """The share of ``base`` that is not in ``ours``; negative where it costs."""
        return 1 - self.ours / self.base


@dataclass(frozen=True, kw_only=True)
class Band:
    """Savings from ``least`` to ``most``; the edges are in it, but for a ``most`` that the next
    word of the scale begins at (``open_above``)."""

    least: float = -math.inf
    most: float = math.inf
    open_above: bool = False

    def holds(self, pair: Pair) -> bool:
        """Whether what ``pair`` saves is in the band."""
        saved = pair.saved
        below = saved < self.most - ROUNDING if self.open_above else saved <= self.most + ROUNDING
        return below and saved >= self.least - ROUNDING


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a sweep, from ``start`` to ``end``. ``started`` and ``ended`` are the neighbouring
    points between which an edge was crossed (one point twice where it lies on it); None where the
    span reaches the end of what was measured."""

    start: float
    end: float
    started: tuple[float, float] | None = None
    ended: tuple[float, float] | None = None


def spans(pairs: Sequence[Pair], band: Band) -> list[Span]:
    """Where what is saved lies in ``band``, in order.

    Between two neighbouring points both sizes are taken to be linear. A step's peak is the highest
    of many instants, each of them a fixed size and so many bytes a sample: it is linear in the
    batch but where the peak moves from one instant to another, and there the line between two
    points lies above it. An edge is therefore known to lie between its two neighbours, and about
    where.
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
    """A span that reaches the end of what was measured has no edge there."""
    started = None if span.start == first else span.started
    ended = None if span.end == last else span.ended
    return dataclasses.replace(span, started=started, ended=ended)


def _joined(parts: Sequence[Span]) -> list[Span]:
    """Parts that touch are one."""
    whole: list[Span] = []
    for part in parts:
        if whole and whole[-1].end == part.start:
            last = whole.pop()
            part = dataclasses.replace(part, start=last.start, started=last.started)
        whole.append(part)
    return whole


def _crossings(low: Pair, high: Pair, band: Band) -> list[float]:
    """Where an edge of ``band`` is crossed between two points, in order."""
    found = []
    for level in (band.least, band.most):
        if math.isinf(level):
            continue
        # saved >= level where ours - (1 - level) base <= 0, which is linear where both are.
        ends = [pair.ours - (1 - level) * pair.base for pair in (low, high)]
        if ends[0] * ends[1] < 0:
            found.append(low.at + (high.at - low.at) * ends[0] / (ends[0] - ends[1]))
    return sorted(found)


def _between(low: Pair, high: Pair, at: float) -> Pair:
    part = (at - low.at) / (high.at - low.at)
    base, ours = (a + (b - a) * part for a, b in ((low.base, high.base), (low.ours, high.ours)))
    return Pair(at=at, base=base, ours=ours)


# ---- what a series tends to, and grows with ----


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value, and how far another estimate of it lies away; None where there is no other."""

    value: float
    spread: float | None


def limit(pairs: Sequence[Pair]) -> Estimate | None:
    """What is saved of an ever larger base: one less the ratio of the slopes of both sizes, from
    the two last points; the spread is its distance to the same from the two before them. None
    where the base does not grow."""
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
    """The p of y ~ x^p through all points; ``spread``: the standard error of that slope in
    logarithms, None of two points; ``first`` and ``last``: the power between the two first and
    the two last points, which shows a curve that is no power."""

    value: float
    spread: float | None
    first: float
    last: float


def power(x: Sequence[float], y: Sequence[float]) -> Power:
    """The power that ``y`` grows with, by least squares through the logarithms of all points, two
    or more."""
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

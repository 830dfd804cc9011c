"""A recipe against another over a sweep of batches: where what it saves lies in a band, what it
tends to, and the words for both. Texts are exact: the rule of their digits is stated too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.recount.lookup import Missing, Rows, beyond_state, state_share, step_bytes

__all__ = ["BATCHES", "HOLDS", "NOT", "ONLY", "OPEN", "Band", "Judged", "Sweep", "at_all", "change"]
__all__ += ["judged", "limit", "points", "said", "share", "sided", "swept"]

BATCHES = {"cpu": (1, 2, 4, 8, 16, 32), "cuda": (1, 2, 4, 8, 16, 32, 64, 96)}
"""Device -> the batches of a sweep."""
HOLDS, ONLY, NOT, OPEN = "holds here", "holds here only", "does not hold here", "not measured"
SAME = 1e-9
Judged = tuple[str, str, str]
"""A verdict, where it holds, and the numbers beside it."""
Line = Callable[[float], float]


@dataclass(frozen=True)
class Band:
    """Savings of ``least`` and more, up to ``most``: itself too, but where ``below`` is set."""

    least: float = -math.inf
    most: float = math.inf
    below: bool = False

    def has(self, saved: float) -> bool:
        if saved < self.least - SAME:
            return False
        return saved < self.most - SAME if self.below else saved <= self.most + SAME


@dataclass
class Sweep:
    """By batch: (ours, base) at the peak of a step and beyond the state, the share of the base's
    peak that is not its state, and why a batch is missing."""

    peaks: dict[float, tuple[int, int]] = field(default_factory=dict)
    beyond: dict[float, tuple[int, int]] = field(default_factory=dict)
    shares: dict[float, float] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)

    def saved(self, batch: float) -> float:
        ours, base = self.peaks[batch]
        return 1 - ours / base

    @property
    def ends(self) -> tuple[float, float]:
        return min(self.peaks), max(self.peaks)


def swept(
    rows: Rows, recipe: str, base: str = "single", at: tuple[int, ...] | None = None
) -> Sweep:
    """Over all batches (``at`` these) at which both were measured and traced."""
    sweep, wanted = Sweep(), at or BATCHES[rows.device]
    for batch in wanted:
        try:
            both = [rows.get(name, global_batch=batch) for name in (recipe, base)]
            peaks, beyond = (tuple(map(take, both)) for take in (step_bytes, beyond_state))
        except Missing as why:
            sweep.missing[batch] = str(why)
            continue
        sweep.peaks[batch], sweep.beyond[batch] = peaks, beyond
        sweep.shares[batch] = 1 - state_share(both[1])
    if not sweep.peaks:
        raise Missing(sweep.missing[wanted[-1]])
    return sweep


# ---- digits that keep a number on its side of every threshold ----


def sided(value: float, limits: Sequence[float], least: int) -> str:
    for places in range(least, 7):
        near = round(value, places)
        if places == 6 or all((near > x, near < x) == (value > x, value < x) for x in limits):
            return f"{value:.{places}f}"
    raise AssertionError


def share(fraction: float, *limits: float) -> str:
    return sided(100 * fraction, [100 * x for x in limits], 0) + "%"


def change(fraction: float, *limits: float) -> str:
    if abs(fraction) < 0.005:
        return "unchanged"
    text = share(fraction, *limits)
    return text if text.startswith("-") else f"+{text}"


def points(spread: float | None) -> str:
    return "of two points" if spread is None else f"+-{100 * spread:.1f}"


# ---- where a saving lies in a band ----


@dataclass
class Span:
    """From ``start`` to ``end``; the measured neighbours of each edge, None at the sweep's ends."""

    start: float
    end: float
    before: tuple[float, ...] | None = None
    behind: tuple[float, ...] | None = None


def line_through(x: tuple[float, float], y: tuple[float, float]) -> Line:
    return lambda at: y[0] + (y[1] - y[0]) * (at - x[0]) / (x[1] - x[0])


def spans(sweep: Sweep, band: Band) -> list[Span]:
    """Between two measured batches both peaks are linear."""
    ordered = sorted(sweep.peaks)
    if len(ordered) == 1:
        return [Span(ordered[0], ordered[0])] * band.has(sweep.saved(ordered[0]))
    found: list[Span] = []
    for low, high in itertools.pairwise(ordered):
        cuts = crossings(sweep, band, low, high)
        ours, base = (
            line_through((low, high), (sweep.peaks[low][side], sweep.peaks[high][side]))
            for side in (0, 1)
        )
        for start, end in itertools.pairwise([low, *cuts, high]):
            middle = (start + end) / 2
            if not band.has(1 - ours(middle) / base(middle)):
                continue
            around = [(low, high) if at in cuts else (at,) for at in (start, end)]
            if found and found[-1].end == start:
                found[-1].end, found[-1].behind = end, around[1]
            else:
                found.append(Span(start, end, *around))
    for span in found:
        span.before = None if span.start == ordered[0] else span.before
        span.behind = None if span.end == ordered[-1] else span.behind
    return found


def crossings(sweep: Sweep, band: Band, low: float, high: float) -> list[float]:
    """Where a level is reached between two batches, by proportion of the excess at either."""
    found = []
    for level in (band.least, band.most):
        if math.isfinite(level):
            (a, b), (c, d) = sweep.peaks[low], sweep.peaks[high]
            excess = a - (1 - level) * b, c - (1 - level) * d
            if min(excess) < 0 < max(excess):
                found.append(low + (high - low) * excess[0] / (excess[0] - excess[1]))
    return sorted(found)


def at_all(sweep: Sweep) -> str:
    first, last = sweep.ends
    if first == last:
        return f"at batch {first}, the one measured"
    return f"at every batch from {first} to {last}"


def judged(sweep: Sweep, band: Band, numbers: str) -> Judged:
    held = spans(sweep, band)
    if not held:
        more = all(sweep.saved(batch) > band.most for batch in sweep.peaks)
        return NOT, "as it saves more" * more, numbers
    if len(held) == 1 and held[0].before is None and held[0].behind is None:
        return HOLDS, at_all(sweep), numbers
    words = [" ".join(edges(span, sweep)) for span in held]
    return ONLY, " and ".join(words).rstrip(","), numbers


def edges(span: Span, sweep: Sweep) -> list[str]:
    texts = []
    named = (("from", span.start, span.before), ("up to", span.end, span.behind))
    for word, at, neighbours in named:
        if neighbours:
            ends = [f"{n} ({share(sweep.shares[n], 0.5)} activations)" for n in neighbours]
            where = f"between {' and '.join(ends)}" if len(ends) > 1 else ends[0]
            texts.append(f"{word} batch {at:.3g}, {where},")
    return texts if span.behind else [*texts, "on"]


# ---- what it tends to, and what is said ----


def limit(sweep: Sweep) -> tuple[float, float | None] | None:
    """One less the ratio of what a sample adds to each beyond the state, from the two largest
    batches; and how far the same from the pair before them lies from it."""

    def tends(pair: list[float]) -> float | None:
        if len(pair) < 2:
            return None
        (a, b), (c, d) = (sweep.beyond[batch] for batch in pair)
        return 1 - (c - a) / (d - b) if d > b else None

    ordered = sorted(sweep.beyond)
    last, earlier = tends(ordered[-2:]), tends(ordered[-3:-1])
    if last is None:
        return None
    return last, None if earlier is None else abs(last - earlier)


def said(sweep: Sweep, band: Band) -> str:
    """What is saved at both ends, and of ever larger batches; what is missing."""
    levels = (-band.least, -band.most)
    ends = sorted(set(sweep.ends))
    each = [f"{change(-sweep.saved(b), *levels)} at batch {b}" for b in ends]
    texts = [f"peak {', '.join(each)}"]
    if len(sweep.peaks) > 1:
        found = limit(sweep)
        texts.append("no limit for large batches: the peak does not grow with them")
        if found:
            texts[-1] = f"limit for large batches {change(-found[0], *levels)} ({points(found[1])})"
            now, then = band.has(sweep.saved(ends[-1])), band.has(found[0])
            if now != then:
                texts[-1] += f": it {'begins' if then else 'ends'} beyond batch {ends[-1]}"
    why = {b: w for b, w in sweep.missing.items() if "not among the results" not in w}
    return "; ".join([*texts, *(f"batch {b} is missing: {w}" for b, w in why.items())])


def with_pace(rows: Rows, recipe: str, base: str, band: Band) -> Judged:
    """Over which batches ``recipe`` saves of ``base``'s peak what the band says."""
    sweep = swept(rows, recipe, base)
    last = sweep.ends[1]
    pace = rows.pace(*(rows.get(name, global_batch=last) for name in (recipe, base)))
    return judged(sweep, band, f"{said(sweep, band)}; speed {pace} at batch {last}")

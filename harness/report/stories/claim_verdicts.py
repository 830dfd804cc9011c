"""How a claim is judged: the verdicts, the thresholds, and numbers that do not contradict them.

A number beside a verdict is printed with as many digits as keep it on its side of the threshold:
a saving of 0.497 that misses a half is never shown as 50 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from harness.report.data.lookup import Missing, Rows

__all__ = [
    "FRACTION",
    "HALF",
    "MUCH",
    "NOTHING",
    "SOME",
    "Judgement",
    "Rule",
    "Verdict",
    "applied",
    "change",
    "number",
    "points",
    "share",
    "spread_words",
]

FRACTION, HALF, MUCH, SOME, NOTHING = 0.5, 0.45, 0.25, 0.05, 0.02
"""Shares of the peak, from which on a saving leaves only a fraction, halves, is much (or medium),
is any at all; and from which on a cost is one. Each word ends where the next begins."""
MOST_PLACES = 6


class Verdict(str, Enum):
    """What the numbers say of a claim, of the model and machine that they are of."""

    HOLDS = "holds here"
    ONLY = "holds here only"
    NOT = "does not hold here"
    NEAR = "cannot be told here:"
    OPEN = "not measured"


@dataclass(frozen=True)
class Judgement:
    """A verdict, where it holds (or why it cannot be told), and the numbers as a sentence."""

    verdict: Verdict
    numbers: str
    condition: str = ""


Rule = Callable[[Rows], Judgement]
"""How a claim is judged by rows, measured or predicted."""


def applied(rule: Rule, rows: Rows) -> Judgement:
    """What a rule says of these rows; open, with the reason, where one that it needs is missing."""
    try:
        return rule(rows)
    except Missing as missing:
        return Judgement(Verdict.OPEN, str(missing))


def places(value: float, limits: Sequence[float], least: int = 0) -> int:
    """Decimals, ``least`` or more, with which ``value`` stays on its side of every limit."""

    def sides(shown: float) -> list[tuple[bool, bool]]:
        return [(shown > limit, shown < limit) for limit in limits]

    tried = range(least, MOST_PLACES)
    return next((p for p in tried if sides(round(value, p)) == sides(value)), MOST_PLACES)


def number(value: float, *limits: float) -> str:
    """A plain number with two decimals, or as many more as its limits ask for."""
    return f"{value:.{places(value, limits, 2)}f}"


def change(fraction: float, *limits: float) -> str:
    """A change of a peak as text; ``limits`` are changes too (a saving is negative)."""
    if abs(fraction) < 0.005:
        return "unchanged"
    return f"{100 * fraction:+.{places(100 * fraction, [100 * x for x in limits])}f}%"


def share(fraction: float, *limits: float) -> str:
    """A part of a whole as text."""
    return f"{100 * fraction:.{places(100 * fraction, [100 * x for x in limits])}f}%"


def spread_words(spread: float | None) -> str:
    """How far a value is known, behind it."""
    if spread is None:
        return "(of two points)"
    return "+- <0.001" if spread < 0.001 else f"+- {spread:.2g}"


def points(spread: float | None) -> str:
    """How far two estimates of a share lie apart, in points of a hundred."""
    return "of two points" if spread is None else f"+-{100 * spread:.1f}"

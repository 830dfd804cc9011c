"""How a claim is judged: the verdicts, the thresholds, and numbers that do not contradict them.

A number beside a verdict is printed with as many digits as keep it on its side of the threshold:
a saving of 0.497 that misses a half is never shown as 50 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = [
    "FRACTION",
    "HALF",
    "MUCH",
    "NOTHING",
    "SOME",
    "Judgement",
    "Verdict",
    "change",
    "number",
    "share",
]

FRACTION, HALF, MUCH, SOME, NOTHING = 0.5, 0.45, 0.25, 0.05, 0.02
"""Shares of the peak, from which on a saving leaves only a fraction, halves, is much (or medium),
is any at all; and from which on a cost is one."""
MOST_PLACES = 6


class Verdict(str, Enum):
    """What the numbers say of a claim."""

    HOLDS = "holds"
    ONLY = "holds only when"
    NOT = "does not hold"
    OPEN = "not measured"


@dataclass(frozen=True)
class Judgement:
    """A verdict, the condition of ``holds only when``, and the numbers as a sentence."""

    verdict: Verdict
    numbers: str
    condition: str = ""


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

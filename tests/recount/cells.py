"""A cell as it should be printed, against what is printed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

__all__ = ["GIB", "MIB", "NONE", "Number", "change", "distance", "fault", "gib", "percent"]

GIB, MIB = 2**30, 2**20
NONE = ("-", "")
"""Texts of a value that is not defined."""
PATTERN = r"([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)"


@dataclass(frozen=True)
class Number:
    """A number in the unit in which it is printed, with ``places`` decimals or more; ``signed``
    where a plus is printed too."""

    value: float
    places: int = 0
    signed: bool = False

    def fault(self, text: str) -> str:
        """What is wrong with ``text``; empty where it is this number, rounded."""
        shown = Decimal(text.replace(",", ""))
        last = shown.as_tuple().exponent
        unit = 10.0**last
        if abs(float(shown) - self.value) > unit * (0.5 + 1e-6) + abs(self.value) * 1e-12:
            return f"{text} is printed, {self.value:.6g} recounted"
        if "e" not in text and -last < self.places:
            return f"{text} has less than {self.places} decimals"
        if self.signed and text[0] not in "+-" and float(shown):
            return f"{text} has no sign"
        return ""


Piece = str | Number
Cell = None | str | Number | tuple[Piece, ...]
"""What a cell holds: nothing, a text, a number, or texts and numbers one after the other."""


def gib(size: float | None) -> Number | None:
    return None if size is None else Number(size / GIB, 2)


def percent(fraction: float | None, places: int = 1) -> Number | None:
    return None if fraction is None else Number(100 * fraction, places)


def change(fraction: float | None, places: int = 1) -> Number | None:
    """A change or an error: a fraction, in percent, with its sign."""
    if fraction is None:
        return None
    value = 100 * fraction
    if abs(value) < 0.5 * 10**-places:
        return Number(0.0, 1)
    return Number(value, places, signed=True)


def distance(value: float | None) -> str | None:
    """A relative distance, as a power of ten with one decimal; 0 only where it is."""
    return None if value is None else f"{value:.1e}" if value else "0"


def fault(text: str, expected: Any) -> str:
    """What is wrong with a printed cell; empty where it is as expected."""
    if expected is None:
        return "" if text in NONE else f"{text!r} is printed where nothing is defined"
    if isinstance(expected, float) and math.isnan(expected):
        return fault(text, None)
    pieces = expected if isinstance(expected, tuple) else (expected,)
    shape = "".join(PATTERN if isinstance(p, Number) else re.escape(str(p)) for p in pieces)
    found = re.fullmatch(shape, text)
    if found is None:
        return f"{text!r} is printed, {shown(pieces)!r} recounted"
    numbers = [p for p in pieces if isinstance(p, Number)]
    faults = (n.fault(t) for n, t in zip(numbers, found.groups(), strict=True))
    return "; ".join(f for f in faults if f)


def shown(pieces: tuple[Piece, ...]) -> str:
    return "".join(f"{p.value:.6g}" if isinstance(p, Number) else str(p) for p in pieces)

"""Numbers as text, and names of memory categories.

The largest value of a column decides its digits, so that decimals align.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from harness.memory.record import MEASURED as CATEGORIES

GIB = 2**30
MIB = 2**20
NONE = "-"
"""A cell without a value."""
SCALE = {
    "gib": 1 / GIB,
    "mib": 1 / MIB,
    "ms": 1e3,
    "percent": 100.0,
    "change": 100.0,
    "error": 100.0,
    "giga": 1e-9,
    "tera": 1e-12,
}
"""Kind of a column -> factor from base units to the shown unit."""
TEXT = ("text", "flag")
"""Kinds whose cells are already text."""
FIXED = {"count": 0, "ratio": 2, "percent": 1, "change": 1, "error": 2, "loss": 4}
"""Kind -> decimals that do not depend on the values."""


def digits(kind: str, values: Sequence[float]) -> int:
    """Return the decimals of a column: fixed, or about three significant ones of its largest."""
    if kind in FIXED:
        return FIXED[kind]
    top = max((abs(v) for v in values if math.isfinite(v)), default=0.0)
    if kind == "gib":
        return 3 if top < 1 else 2
    below_ten = 3 if kind == "rate" else 2
    return next((d for limit, d in ((10, below_ten), (100, 2), (1000, 1)) if top < limit), 0)


def column(kind: str, values: Sequence[Any]) -> list[str]:
    """Return the cells of one column; None is a dash, and text replaces a missing number.

    Kinds: text, flag, count, gib and mib (from bytes), ms (from seconds), seconds, rate, ratio,
    loss, percent, change and error (from fractions), giga, tera, distance (scientific).
    """
    if kind in TEXT:
        return [NONE if v is None else str(v) for v in values]
    scale = SCALE.get(kind, 1)
    scaled = [v if v is None or isinstance(v, str) else v * scale for v in values]
    places = digits(kind, [v for v in scaled if v is not None and not isinstance(v, str)])
    return [v if isinstance(v, str) else _number(kind, v, places) for v in scaled]


def one(kind: str, value: Any) -> str:
    """Return a single value as text."""
    return column(kind, [value])[0]


def gib(value: float | None) -> str:
    """Return bytes as GiB with the unit."""
    return NONE if value is None else f"{one('gib', value)} GiB"


def _number(kind: str, value: float | None, places: int) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NONE
    if kind == "distance":
        return "0" if value == 0 else f"{value:.1e}"
    if kind in ("change", "error"):
        text = f"{value:+.{places}f}"
        return "0.0" if float(text) == 0 else text
    return f"{value:.{places}f}"


ALL_CATEGORIES = (*CATEGORIES, "other_models")
"""With the models beside the trained one, which only runs of a user's script have."""
STATE = tuple(name for name in CATEGORIES if name not in ("activations", "workspace"))
"""Categories that a training keeps from one step to the next."""


def in_sentence(name: str) -> str:
    """Return ``optimizer state`` for ``optimizer_state``."""
    return "EMA" if name == "ema" else name.replace("_", " ")


def title(name: str) -> str:
    """Return ``Optimizer state`` for ``optimizer_state``: a table's head, a legend's entry."""
    text = in_sentence(name)
    return text[0].upper() + text[1:]

"""What measured rows tell of predicted times: a factor for each part, and how far off rows stay.

Ceilings are of single operations, and a step is not their sum: caches, launches and other threads
are left out alike for all recipes. So each part of a predicted time (computing, communicating,
offloading) gets one factor: those that bring the rows' relative errors to their least squares,
together, and none below ``LOWEST``. What then remains between predicted and measured is the
uncertainty of the next prediction. Pure functions; no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.calibration.record import MeasuredRow

__all__ = ["LEAST", "PARTS", "Fitted", "fitted", "left_out_errors", "predicted_seconds"]

PARTS = ("compute", "communication", "offload")
SHARE = 0.10
"""Of a predicted step: a part with more must have a factor for the row to tell of the others."""
TOLD, TELLERS = 0.02, 2
"""Of a predicted step, and rows: a part gets a factor where as many rows have so much of it."""
LOWEST = 0.1
"""The least that a factor can be."""
LEAST = 3
"""Rows in which parts are fitted; fewer say nothing of the next one."""
FLOOR = 0.03
"""The least uncertainty that is claimed: steps themselves differ by as much."""
STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782)
"""Student's t within which 90 % lie, for 1 to 12 degrees of freedom."""
NORMAL = 1.645


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Part -> its factor, and -> the share by which nine of ten predictions are off at the most;
    parts that were not fitted are in neither. ``rows``: how many tell of the share."""

    factors: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    rows: int = 0


def fitted(rows: Sequence[MeasuredRow]) -> Fitted:
    """Factors and uncertainty of the rows that were timed; empty where they are too few."""
    timed = [row for row in rows if row.timed]
    if len(timed) < LEAST:
        return Fitted()
    parts = [part for part in PARTS if _told(timed, part)]
    told = [row for row in timed if all(_share(row, p) < SHARE or p in parts for p in PARTS)]
    freedom = len(told) - len(parts)
    if "compute" not in parts or freedom < 1:
        return Fitted()
    factors = _factors(told, parts)
    misses = [_miss(row, factors) for row in told]
    return Fitted(
        factors=factors, shares=dict.fromkeys(factors, _within(misses, freedom)), rows=len(told)
    )


def predicted_seconds(row: MeasuredRow, factors: Mapping[str, float]) -> float:
    """A row's step by its ceilings and these factors."""
    return sum(factors.get(part, 1.0) * (getattr(row, part) or 0.0) for part in PARTS)


def left_out_errors(rows: Sequence[MeasuredRow]) -> dict[str, float]:
    """Label -> error of the row's predicted time where the factors were fitted to the others alone:
    what a row that was not there would have met. None where the others are too few."""
    timed = [row for row in rows if row.timed]
    errors = {}
    for row in timed:
        others = fitted([other for other in timed if other is not row])
        if others.rows:
            errors[row.label] = predicted_seconds(row, others.factors) / row.step_seconds - 1
    return errors


def _factors(rows: Sequence[MeasuredRow], parts: Sequence[str]) -> dict[str, float]:
    """The factors by which the rows' relative errors are least in squares: of what is left beyond
    the least factor of each, by those that are not negative."""
    shares = [[(getattr(row, p) or 0.0) / row.step_seconds for p in parts] for row in rows]
    rest = [_unfitted(row, parts) / row.step_seconds for row in rows]
    left = [1 - more - LOWEST * sum(own) for own, more in zip(shares, rest, strict=True)]
    choices = itertools.chain.from_iterable(
        itertools.combinations(range(len(parts)), size) for size in range(len(parts) + 1)
    )
    solved = [_solved(shares, left, chosen) for chosen in choices]
    best = min((s for s in solved if s is not None), key=lambda s: _squares(shares, left, s))
    return {part: LOWEST + more for part, more in zip(parts, best, strict=True)}


def _unfitted(row: MeasuredRow, parts: Sequence[str]) -> float:
    """Seconds of the parts that get no factor."""
    return sum(getattr(row, part) or 0.0 for part in PARTS if part not in parts)


def _solved(
    shares: Sequence[Sequence[float]], left: Sequence[float], chosen: Sequence[int]
) -> list[float] | None:
    """Least squares in the ``chosen`` unknowns, the others 0; None where one would be negative or
    the rows do not tell them apart. By normal equations: there are three unknowns at the most."""
    matrix = [[math.fsum(row[i] * row[j] for row in shares) for j in chosen] for i in chosen]
    target = [math.fsum(row[i] * y for row, y in zip(shares, left, strict=True)) for i in chosen]
    found = _gauss(matrix, target)
    if found is None or any(value < 0 for value in found):
        return None
    whole = [0.0] * len(shares[0])
    for place, value in zip(chosen, found, strict=True):
        whole[place] = value
    return whole


def _gauss(matrix: list[list[float]], target: list[float]) -> list[float] | None:
    """The solution of a small symmetric system; None where it is singular."""
    size = len(target)
    rows = [[*line, value] for line, value in zip(matrix, target, strict=True)]
    for i in range(size):
        if rows[i][i] < 1e-12:
            return None
        for j in range(size):
            if j != i:
                factor = rows[j][i] / rows[i][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]


def _squares(
    shares: Sequence[Sequence[float]], left: Sequence[float], factors: Sequence[float]
) -> float:
    def off(row: Sequence[float], y: float) -> float:
        return sum(a * b for a, b in zip(row, factors, strict=True)) - y

    return math.fsum(off(row, y) ** 2 for row, y in zip(shares, left, strict=True))


def _told(rows: Sequence[MeasuredRow], part: str) -> bool:
    """Whether enough rows have the part; one beside computing must be more in some than in others,
    or nothing tells the two apart."""
    shares = [_share(row, part) for row in rows]
    enough = sum(share >= TOLD for share in shares) >= TELLERS
    return enough and (part == "compute" or max(shares) - min(shares) >= TOLD)


def _share(row: MeasuredRow, part: str) -> float:
    whole = predicted_seconds(row, {})
    return (getattr(row, part) or 0.0) / whole if whole else 0.0


def _miss(row: MeasuredRow, factors: Mapping[str, float]) -> float:
    return math.log(row.step_seconds / predicted_seconds(row, factors))


def _within(misses: Sequence[float], freedom: int) -> float:
    """The share that holds nine of ten further rows, by Student's t."""
    deviation = math.sqrt(math.fsum(miss * miss for miss in misses) / freedom)
    student = STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL
    return max(FLOOR, math.expm1(student * deviation * math.sqrt(1 + 1 / len(misses))))

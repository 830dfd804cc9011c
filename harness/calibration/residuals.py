"""What measured rows tell of predicted times: a factor for each part, and how far off rows stay.

Ceilings are of single operations, and a step is not their sum: caches, launches and other threads
are left out alike for all recipes. So each part of a predicted time (computing, communicating,
offloading) gets one factor, fitted to the rows in which it counts; what then remains between
predicted and measured is the uncertainty of the next prediction. Pure functions; no torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.calibration.record import MeasuredRow

__all__ = ["LEAST", "PARTS", "Fitted", "fitted", "left_out_errors", "predicted_seconds"]

PARTS = ("compute", "communication", "offload")
SHARE = 0.10
"""Of a predicted step: a part with less is not what a row tells of."""
LOWEST = 0.1
"""The least that a factor can be: a measured step may be shorter than its other parts alone."""
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
    factors = _factors(timed)
    told = [row for row in timed if all(_share(row, p) < SHARE or p in factors for p in PARTS)]
    freedom = len(told) - len(factors)
    if "compute" not in factors or freedom < 1:
        return Fitted()
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


def _factors(timed: Sequence[MeasuredRow]) -> dict[str, float]:
    """Computing first, of the rows that do little else; then each other part of what is left."""
    factors: dict[str, float] = {}
    for part, besides in zip(PARTS, (("communication", "offload"), ("offload",), ()), strict=True):
        rows = [row for row in timed if _share(row, part) >= SHARE]
        rows = [row for row in rows if all(_share(row, other) < SHARE for other in besides)]
        if rows:
            factors[part] = _geometric([_ratio(row, part, factors) for row in rows])
    return factors


def _ratio(row: MeasuredRow, part: str, factors: Mapping[str, float]) -> float:
    """What a row leaves for ``part`` beyond its other parts, over what was predicted of it."""
    own = getattr(row, part)
    others = predicted_seconds(row, factors) - own
    return max((row.step_seconds - others) / own, LOWEST)


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


def _geometric(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))

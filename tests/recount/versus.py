"""A row against its reference: ratios, distances of curves, verdict, front and rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.recount import measures as m
from tests.recount.raw import Group, Row

__all__ = ["curve_distance", "front", "parity", "ranked"]


def curve_distance(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The largest step's abs(a - b) / abs(b)."""
    pairs = list(zip(ours, theirs, strict=False))
    if any(not (math.isfinite(a) and math.isfinite(b)) for a, b in pairs):
        return math.inf
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=None)


def farthest(row: Row, curve: str, first: int | None = None) -> float | None:
    """Of all repetitions; of the ``first`` steps, or all."""
    theirs = row.group.reference.first[curve][:first]
    found = [curve_distance(run.data[curve][:first], theirs) for run in row.runs]
    return max((d for d in found if d is not None), default=None)


def loss_distance(row: Row) -> float | None:
    return farthest(row, "losses")


def grad_norm_distance(row: Row) -> float | None:
    return farthest(row, "grad_norms")


def limits(group: Group) -> tuple[float, float]:
    """Of a loss and of a gradient norm in the first 16 steps: tight in float32 on CPUs."""
    exact = m.precision(group.reference) == "float32" and not group.gpu
    return (1e-5, 2e-5) if exact else (1e-3, 1e-3)


def differs(row: Row) -> bool:
    """Beyond the limit of the first 16 steps, or of all."""
    pairs = zip(("losses", "grad_norms"), limits(row.group), strict=True)
    return any(
        (farthest(row, curve, 16) or 0) > limit or (farthest(row, curve) or 0) > 1e-3
        for curve, limit in pairs
    )


def parity(row: Row) -> str:
    promised, reference = row.first["parity"], row.group.reference.first["parity"]
    if row.is_reference:
        return "reference"
    if loss_distance(row) is None or (promised == "exact" and reference != "exact"):
        return "not comparable"
    if promised != "exact":
        return "by design"
    if differs(row):
        return "DIFFERS"
    return "equal losses" if grad_norm_distance(row) is None else "equal"


def speed_ratio(row: Row) -> float:
    return m.samples_per_second(row) / m.samples_per_second(row.group.reference)


def peak_change_fraction(row: Row) -> float | None:
    ours, theirs = m.peak_bytes(row), m.peak_bytes(row.group.reference)
    return ours / theirs - 1 if ours and theirs else None


def front(row: Row) -> bool:
    """No other row has both a lower peak and more samples/s; a row that DIFFERS is never on it."""
    if parity(row) == "DIFFERS" or m.peak_bytes(row) is None or row.group.world:
        return False
    point = (m.peak_bytes(row), m.samples_per_second(row))
    able = [r for r in row.group.rows if parity(r) != "DIFFERS" and m.peak_bytes(r) is not None]
    others = [(m.peak_bytes(r), m.samples_per_second(r)) for r in able]
    return not any(o[0] <= point[0] and o[1] >= point[1] and o != point for o in others)


def ranked(group: Group) -> list[Row]:
    """Fastest first; simulated worlds by their peak."""
    if group.world:
        return sorted(group.rows, key=lambda row: m.peak_bytes(row) or math.inf)
    return sorted(group.rows, key=m.samples_per_second, reverse=True)

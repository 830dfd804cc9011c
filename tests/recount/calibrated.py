"""The table of planned and measured steps on docs/calibrate.md, from the calibration's raw rows and
from the raw results that they are of: its least squares found by another way."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.recount.pages import Table

__all__ = ["PLACE", "faults"]

PLACE = ("docs/calibrate.md", "A CPU, planned and measured")
"""Page, and the title of the table."""
CALIBRATION = "docs/results/cpu-2-cores-calibration/calibration.json"
RUNS = "docs/results/cpu-2-cores/runs"
PARTS = ("compute", "communication", "offload")
LEAST_FACTOR, SWEEPS = 0.1, 4000


def faults(table: Table, root: Path) -> Iterator[str]:
    """Cells that are not what the raw rows say."""
    rows = json.loads((root / CALIBRATION).read_text(encoding="utf-8"))["rows"]
    medians = _medians(root / RUNS)
    if [line[0] for line in table.lines] != [row["recipe"] for row in rows]:
        yield "the rows are not those of the calibration"
    for line, row in zip(table.lines, rows, strict=False):
        took = medians.get(row["recipe"])
        if took is None or abs(took - row["step_seconds"]) > 1e-9:
            yield f"{line[0]}: its step is not that of {RUNS}"
        wanted = _cells(row, rows)
        yield from (
            f"{line[0]}: {head} is {cell}, recounted {other}"
            for head, cell, other in zip(table.heads[1:], line[1:], wanted, strict=True)
            if cell != other
        )


def _medians(folder: Path) -> dict[str, float]:
    """Recipe -> median seconds of its steps, each the slowest rank's."""
    found = {}
    for path in folder.glob("*/result.json"):
        run = json.loads(path.read_text(encoding="utf-8"))
        if not run["spec"]["repeat"]:
            steps = zip(*(rank["step_seconds"] for rank in run["ranks"]), strict=True)
            found[run["spec"]["recipe"]] = statistics.median(map(max, steps))
    return found


def _cells(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    took = row["step_seconds"]
    fitted = _seconds(row, _factors(rows))
    unseen = _seconds(row, _factors([other for other in rows if other is not row]))
    milliseconds = (f"{1000 * value:.0f}" for value in (took, fitted))
    errors = [f"{100 * (v - took) / took:+.1f}" for v in (row["typical_seconds"], fitted, unseen)]
    measured, planned = milliseconds
    return [measured, errors[0], planned, *errors[1:]]


def _seconds(row: dict[str, Any], factors: list[float]) -> float:
    return sum(factor * row[part] for factor, part in zip(factors, PARTS, strict=True))


def _factors(rows: list[dict[str, Any]]) -> list[float]:
    """One unknown after the other at its best, the others held, over and over."""
    columns = [[row[part] / row["step_seconds"] for row in rows] for part in PARTS]
    factors = [1.0] * len(PARTS)
    left = [1 - sum(shares) for shares in zip(*columns, strict=True)]
    for _ in range(SWEEPS):
        before = list(factors)
        for place, column in enumerate(columns):
            better = factors[place] + _dot(column, left) / _dot(column, column)
            change = max(better, LEAST_FACTOR) - factors[place]
            left = [rest - change * share for rest, share in zip(left, column, strict=True)]
            factors[place] += change
        if max(abs(a - b) for a, b in zip(before, factors, strict=True)) < 1e-12:
            break
    return factors


def _dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))

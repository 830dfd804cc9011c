"""Public rows (docs/public-rows.yaml): predictions of what others measured on their GPUs.

python -m docs.make.public_rows                  median error and coverage of the kept ones
python -m docs.make.public_rows predict [N ...]  predict rows (counted from 1) anew first,
                                                 write the file and the planner's ranges
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from harness.planner.uncertainty import Residual, share_of

FILE = Path(__file__).parents[1] / "public-rows.yaml"
Row = dict[str, Any]


def rows() -> list[Row]:
    return yaml.safe_load(FILE.read_text("utf-8"))


def figure(row: Row) -> str:
    """Return the peak that a row is compared by: what was reserved if its source states it."""
    return next((name for name in ("reserved", "allocated") if name in row), "")


def is_plain(row: Row) -> bool:
    """Return whether a row is the peak of a step of the very recipe (not near, not a whole run)."""
    return bool(figure(row)) and "near" not in row and row.get("figure") != "whole run"


def error(row: Row) -> float:
    """Return measured over predicted memory, less one; a corrected row keeps its first figure."""
    return round(row[figure(row)] / row.get("first", row["predicted"][figure(row)]) - 1, 4)


def residuals(held: bool = False) -> list[Residual]:
    """Return the plain rows that make the ranges, or those that are held from them."""
    chosen = [row for row in rows() if is_plain(row) and ("held" in row) == held]
    return [Residual(r["predicted"]["class"], r["run"]["model"], error(r)) for r in chosen]


def times() -> Iterator[tuple[float, bool]]:
    """Yield each step time's relative error, and whether the stated range covers it."""
    for row in rows():
        for card, measured in row.get("seconds", {}).items():
            got, low, high = row["predicted"]["seconds"][card]
            yield abs(got / measured - 1), low <= measured <= high


def memory() -> Iterator[tuple[str, list[float], int]]:
    """Yield a group of rows, its errors, and how many of them the range of others covers."""
    making, held = (residuals(held) for held in (False, True))
    left = [[o for o in making if o.model != one.model] for one in making]
    ok = sum(abs(o.error) <= share_of(o.kind, x).share for o, x in zip(making, left, strict=True))
    yield "memory, by the range of all other models' rows", [o.error for o in making], ok
    ok = sum(abs(one.error) <= share_of(one.kind, making).share for one in held)
    yield "memory, held from the ranges", [one.error for one in held], ok


def main(words: list[str]) -> None:
    if words[:1] == ["predict"]:
        from docs.make.predict_rows import predict_rows  # needs torch

        predict_rows([int(word) for word in words[1:]])
    errors, covered = zip(*times(), strict=True)
    for name, some, inside in [*memory(), ("step times", errors, sum(covered))]:
        middle = statistics.median(map(abs, some))
        print(f"{name}: {len(some)} rows, median error {middle:.1%}, {inside} covered")


if __name__ == "__main__":
    main(sys.argv[1:])

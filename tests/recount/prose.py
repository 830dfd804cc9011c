"""Sentences of docs that sum up a result set: their numbers, recounted.

A sentence that is reworded fails here by its absence: its pattern, or its line, must follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.recount import predicted as p
from tests.recount.cells import MIB, Number, fault, percent
from tests.recount.raw import ResultSet, Row

__all__ = ["SENTENCES", "faults"]

SET = "docs/results/cpu-2-cores"
N = r"([\d.]+)"


def ends(values: list[float], places: int = 0) -> list[Number]:
    """Least and most."""
    return [Number(min(values), places), Number(max(values), places)]


def of_steps(rows: list[Row]) -> list[Number]:
    """The largest errors of a category and of a step, and of how many rows."""
    parts = max(abs(part.error) for row in rows for part in p.parts(row))
    steps = max(abs(p.step_error(row)) for row in rows)
    return [percent(parts, 2), Number(len(rows)), percent(steps, 2)]


def of_runs(rows: list[Row]) -> list[Number]:
    """How many rows of ZeRO, how far their peak lies above the prediction, and of the others."""
    found: list[Number] = []
    for zero in (True, False):
        some = [row for row in rows if row.recipe.startswith("zero") is zero]
        above = [(p.run_measured(row) - p.run_predicted(row)) / MIB for row in some]
        found += [Number(len(some)), *ends(above)]
        found += ends([-100 * p.run_error(row) for row in some], 1)
    return found


SENTENCES: dict[tuple[str, str], Callable[[list[Row]], list[Number]]] = {
    (
        "docs/plan.md",
        rf"within {N} % on the {N} rows of `{SET}`, the tensors of a step in all within {N} %",
    ): of_steps,
    (
        "docs/plan.md",
        rf"of the {N} ZeRO rows lies {N} to {N} MiB above the prediction, {N} % to {N} % of runs as"
        rf" small as these; of the {N} other rows {N} to {N} MiB, {N} % to {N} %",
    ): of_runs,
}
"""Page and pattern -> its numbers, of the rows of ``SET``."""


def faults(root: Path) -> Iterator[str]:
    rows = ResultSet(root / SET).rows
    for (page, pattern), take in SENTENCES.items():
        found = re.search(pattern, (root / page).read_text(encoding="utf-8"))
        if found is None:
            yield f"{page}: the sentence {pattern!r} is gone; say in {__name__} what it became"
            continue
        numbers = zip(found.groups(), take(rows), strict=True)
        yield from (f"{page}: {fault(t, n)}" for t, n in numbers if fault(t, n))

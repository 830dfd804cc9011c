"""What the rows of one suite tell together: the ladder, and the claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.recount import claims
from tests.recount import measures as m
from tests.recount import versus as v
from tests.recount.cells import Cell, Number, change, fault, gib
from tests.recount.lookup import Rows, step_bytes
from tests.recount.pages import Table
from tests.recount.raw import ResultSet, Row

__all__ = ["STORIES"]


# ---- the ladder ----


def added(row: Row, above: Row) -> str:
    here, there = row.recipe.split("+"), above.recipe.split("+")
    new = ", ".join(part for part in here if part not in there)
    gone = ", ".join(part for part in there if part not in here)
    return f"+ {new} (in place of {gone})" if gone else f"+ {new}"


def saved(row: Row, other: Row) -> Cell:
    fraction = step_bytes(row) / step_bytes(other) - 1
    return (change(fraction), " %")


RUNG: dict[str, Callable[[Row, Row | None, Row], Cell]] = {
    "What was added": lambda row, above, _: added(row, above) if above else row.recipe,
    "Peak GiB": lambda row, *_: gib(step_bytes(row)),
    "Saved by it": lambda row, above, _: above and saved(row, above),
    "Saved in all": lambda row, above, first: above and saved(row, first),
    "Samples/s": lambda row, *_: Number(m.samples_per_second(row), 1),
    "Speed x": lambda row, above, _: (
        above and Number(m.samples_per_second(row) / m.samples_per_second(above), 2)
    ),
    "Losses": lambda row, *_: v.parity(row),
}
"""Column -> what it says of a row, the row above it, and the first."""


def ladder(table: Table, results: ResultSet) -> Iterator[str]:
    """Rows in the suite's order, each with the one above."""
    rows = Rows(results)
    rungs = [rows.get(recipe) for recipe in results.suite["order"]]
    if len(rungs) != len(table.lines):
        yield f"{len(table.lines)} lines, {len(rungs)} recounted"
    yield from (f"no rule here for the column {h!r}" for h in table.heads if h not in RUNG)
    for line, row, above in zip(table.lines, rungs, [None, *rungs], strict=False):
        for head, text in zip(table.heads, line, strict=True):
            wrong = fault(text, RUNG[head](row, above, rungs[0])) if head in RUNG else ""
            if wrong:
                yield f"{line[0]}, {head}: {wrong}"


STORIES = {"The ladder": ladder, "Claims, measured": claims.faults}
"""Title of a story's table -> its mismatches."""

"""Rows in the suite's order, each against the reference: what it saves, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tests.recount import measures as m
from tests.recount import versus as v
from tests.recount.cells import Cell, Number, change, fault, gib
from tests.recount.lookup import STATE, Missing, Rows, beyond_state, step_bytes
from tests.recount.pages import Table
from tests.recount.raw import ResultSet, Row

__all__ = ["HEADS", "against_the_reference", "line_faults"]


def saved(row: Row, base: Row) -> float:
    return 1 - step_bytes(row) / step_bytes(base)


def pace(row: Row, base: Row) -> Cell:
    if row is base:
        return None
    found = v.ratio_cell(row, base)
    return found if isinstance(found, str) else Number(found, 2)


HEADS: dict[str, Callable[[Row, Row], Cell]] = {
    "Recipe": lambda row, _: row.label,
    "Peak GiB": lambda row, _: gib(step_bytes(row)),
    "State in it GiB": lambda row, _: gib(sum(m.category(name)(row) for name in STATE)),
    "Most beyond GiB": lambda row, _: gib(beyond_state(row)),
    "Saved": lambda row, base: None if row is base else (change(-saved(row, base)), " %"),
    "Samples/s": lambda row, _: Number(m.samples_per_second(row), 1),
    "Speed x": pace,
    "Losses": lambda row, _: v.parity(row),
}
"""Column -> what it says of a row and of the reference."""


def line_faults(
    line: list[str], name: str, rows: Rows, recipe: str, base: str, spec: Mapping[str, str]
) -> Iterator[str]:
    """Mismatches of the cells below ``HEADS``."""
    try:
        row, reference = rows.get(recipe, **spec), rows.get(base, **spec)
        cells = [take(row, reference) for take in HEADS.values()]
    except Missing as why:
        cells = [recipe, *[None] * (len(HEADS) - 2), str(why)]
    for head, text, cell in zip(HEADS, line, cells, strict=True):
        wrong = fault(text, cell)
        if wrong:
            yield f"{name}, {head}: {wrong}"


def against_the_reference(table: Table, results: ResultSet) -> Iterator[str]:
    """The table of the story "each"."""
    rows, order = Rows(results), results.suite["order"]
    if table.heads != list(HEADS):
        yield f"the heads are {table.heads}, {list(HEADS)} recounted"
        return
    if len(order) != len(table.lines):
        yield f"{len(table.lines)} lines, {len(order)} recounted"
    for line, recipe in zip(table.lines, order, strict=False):
        yield from line_faults(line, line[0], rows, recipe, results.suite["reference"], {})

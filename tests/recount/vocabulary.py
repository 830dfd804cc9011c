"""The table of the suite ``vocabulary``: each loss against all logits of its own vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tests.recount import measures as m
from tests.recount import versus as v
from tests.recount.cells import Cell, Number, change, fault, gib
from tests.recount.lookup import STATE, Missing, Rows, beyond_state, step_bytes
from tests.recount.pages import Table
from tests.recount.raw import ResultSet, Row

__all__ = ["memory_against_vocabulary"]


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


def models(results: ResultSet) -> list[tuple[int, str]]:
    """The vocabularies that were measured, ascending, and the models that have them."""
    names = {row.spec["model"] for group in results.groups for row in group.rows}
    return sorted((int(re.search(r"tokens=(\d+)", name)[1]), name) for name in names)


def memory_against_vocabulary(table: Table, results: ResultSet) -> Iterator[str]:
    """Rows by vocabulary, in the suite's order each."""
    rows, first = Rows(results), results.suite["reference"]
    if table.heads != ["Vocabulary", *HEADS]:
        yield f"the heads are {table.heads}, {['Vocabulary', *HEADS]} recounted"
        return
    recipes = list(dict.fromkeys(results.suite["order"]))
    wanted = [(words, model, recipe) for words, model in models(results) for recipe in recipes]
    if len(table.lines) != len(wanted):
        yield f"{len(table.lines)} lines, {len(wanted)} recounted"
    for line, (words, model, recipe) in zip(table.lines, wanted, strict=False):
        try:
            row, base = rows.get(recipe, model=model), rows.get(first, model=model)
            cells = [f"{words:,}", *(take(row, base) for take in HEADS.values())]
        except Missing as why:
            cells = [f"{words:,}", recipe, *[None] * (len(HEADS) - 2), str(why)]
        for head, text, cell in zip(table.heads, line, cells, strict=True):
            wrong = fault(text, cell)
            if wrong:
                yield f"{' '.join(line[:2])}, {head}: {wrong}"

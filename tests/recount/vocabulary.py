"""The table of the suite ``vocabulary``: each loss against all logits of its own vocabulary."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.recount.each import HEADS, line_faults
from tests.recount.lookup import Rows
from tests.recount.pages import Table
from tests.recount.raw import ResultSet

__all__ = ["memory_against_vocabulary"]


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
        name = " ".join(line[:2])
        if line[0] != f"{words:,}":
            yield f"{name}, Vocabulary: {words:,} recounted"
        yield from line_faults(line[1:], name, rows, recipe, first, {"model": model})

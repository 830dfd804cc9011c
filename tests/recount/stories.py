"""What the rows of one suite tell together: the ladder, and the claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.recount import claims, each, inference, vocabulary
from tests.recount import measures as m
from tests.recount import versus as v
from tests.recount.cells import Cell, Number, change, fault, gib
from tests.recount.lookup import Missing, Rows, step_bytes
from tests.recount.pages import Table
from tests.recount.raw import ResultSet, Row

__all__ = ["DUE", "STORIES", "due", "told"]


# ---- the ladder ----


def added(row: Row, above: Row) -> str:
    here, there = row.recipe.split("+"), above.recipe.split("+")
    new = ", ".join(part for part in here if part not in there)
    gone = ", ".join(part for part in there if part not in here)
    return f"+ {new} (in place of {gone})" if gone else f"+ {new}"


def saved(row: Row, other: Row) -> Cell:
    fraction = step_bytes(row) / step_bytes(other) - 1
    return (change(fraction), " %")


def ratio(row: Row, other: Row) -> Cell:
    found = v.ratio_cell(row, other)
    return found if isinstance(found, str) else Number(found, 2)


def whole_run(row: Row) -> int | None:
    """What a device must have free on a GPU; without one the resident mark."""
    return m.need_bytes(row) if row.group.gpu else m.resident_bytes(row)


RUNG: dict[str, Callable[[Row, Row | None, Row], Cell]] = {
    "What was added": lambda row, above, _: added(row, above) if above else row.label,
    "Peak GiB": lambda row, *_: gib(step_bytes(row)),
    "Whole run GiB": lambda row, *_: gib(whole_run(row)),
    "Saved by it": lambda row, above, _: above and saved(row, above),
    "Saved in all": lambda row, above, first: above and saved(row, first),
    "Samples/s": lambda row, *_: Number(m.samples_per_second(row), 1),
    "Speed x": lambda row, above, _: above and ratio(row, above),
    "Losses": lambda row, *_: v.parity(row),
}
"""Column -> what it says of a row, the row above it, and the first."""


def ladder(table: Table, results: ResultSet) -> Iterator[str]:
    """Rows in the suite's order, each with the last one above that was measured."""
    rows, above, first = Rows(results), None, None
    order = results.suite["order"]
    if len(order) != len(table.lines):
        yield f"{len(table.lines)} lines, {len(order)} recounted"
    if table.heads != list(RUNG):
        yield f"the heads are {table.heads}, {list(RUNG)} recounted"
        return
    for line, recipe in zip(table.lines, order, strict=False):
        try:
            row = rows.get(recipe)
            cells = [take(row, above, first or row) for take in RUNG.values()]
            above, first = row, first or row
        except Missing as why:
            cells = [f"+ {recipe}", *[None] * (len(RUNG) - 2), str(why)]
        for head, text, cell in zip(table.heads, line, cells, strict=True):
            wrong = fault(text, cell)
            if wrong:
                yield f"{line[0]}, {head}: {wrong}"


STORIES = {
    "The ladder": ladder,
    "Claims, measured": claims.faults,
    "The peak over batches": claims.sweep_faults,
    "What memory beyond the state grows with": claims.growth_faults,
    "Predicted for": claims.foretold_faults,
    "Memory against samples": inference.memory_against_samples,
    "Claims on inference": inference.claims,
    "Memory against vocabulary": vocabulary.memory_against_vocabulary,
    "Each against the reference": each.against_the_reference,
}
"""How a story's table begins -> its mismatches."""
DUE = {"ladder": tuple(STORIES)[:1], "claims": tuple(STORIES)[1:4]}
DUE |= {"sampled": tuple(STORIES)[5:6], "quality": tuple(STORIES)[5:7]}
DUE |= {"vocabulary": tuple(STORIES)[7:8], "each": tuple(STORIES)[8:9]}
"""Story -> how the tables begin that it must have."""


def due(results: ResultSet) -> list[str]:
    """How the tables begin that a set's story must have."""
    named = list(DUE.get(results.suite.get("story"), ()))
    if results.forecast:
        word = f"Predicted for {results.forecast['model']}: "
        named += [word + name[0].lower() + name[1:] for name in named[1:]]
    return named


def told(title: str) -> Callable[[Table, ResultSet], Iterator[str]] | None:
    """The rule of a story's table."""
    return next((rule for name, rule in STORIES.items() if title.startswith(name)), None)

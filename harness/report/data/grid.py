"""Tables as text: every format draws the same cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.report.figures import units


@dataclass(frozen=True)
class Column:
    """A column: its head with unit, the function from row to value, and its kind (units.py)."""

    head: str
    take: Callable[[Any], Any]
    kind: str = "text"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of text, ready to be drawn.

    ``lines`` have one cell for each of ``columns``. ``marks`` describe each line in words
    (reference, front, alarm). ``note`` explains the columns.
    """

    key: str
    title: str
    columns: list[Column]
    lines: list[list[str]]
    marks: list[tuple[str, ...]]
    note: str = ""

    @property
    def heads(self) -> list[str]:
        return [column.head for column in self.columns]

    @property
    def rows(self) -> list[tuple[list[str], tuple[str, ...]]]:
        """The cells and the marks of each line."""
        return list(zip(self.lines, self.marks, strict=True))


def tabulate(
    key: str,
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Any],
    *,
    marks: Sequence[tuple[str, ...]] | None = None,
    note: str = "",
) -> Grid:
    """Return a table with one line for each row; columns without any value are left out."""
    values_of = [(column, [column.take(row) for row in rows]) for column in columns]
    kept = [(c, values) for c, values in values_of if any(v not in (None, "") for v in values)]
    cells = [units.column(column.kind, values) for column, values in kept]
    return Grid(
        key=key,
        title=title,
        columns=[column for column, _ in kept],
        lines=[list(line) for line in zip(*cells, strict=True)],
        marks=[() for _ in rows] if marks is None else list(marks),
        note=note,
    )

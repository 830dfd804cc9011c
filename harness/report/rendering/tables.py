"""All tables of a report: key, title, columns, and rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from harness.report.data.effects import effects
from harness.report.data.grid import Column, Grid, tabulate
from harness.report.data.rows import Group, Row, Unfinished
from harness.report.figures import derive
from harness.report.figures.predicted import PredictedCategory
from harness.report.rendering.columns import (
    BUCKETS,
    CALIBRATED,
    CATEGORY_ERRORS,
    DRAWING_PHASES,
    DRAWN,
    EFFECTS,
    FLAGS,
    GATHERS,
    HOST_SPLIT,
    MEMORY,
    PARITY,
    PEAK,
    PHASES,
    PREDICTED,
    RANKING,
    SIBLINGS,
    SIMULATED,
    SPLIT,
    TIME,
    TYPES,
    UNFINISHED,
    detail,
    flags,
    fullest_host,
    gathering,
    zero_block,
)
from harness.report.rendering.explanations import NOTES


def _table(key: str, title: str, columns: Sequence[Column], rows: Sequence[Any]) -> Grid:
    """Return ``tabulate`` with the note of this table; ranked rows are marked."""
    marks = [_marks(row) if isinstance(row, Row) else () for row in rows]
    return tabulate(key, title, columns, rows, marks=marks, note=NOTES.get(key, ""))


def _marks(row: Row) -> tuple[str, ...]:
    """Return a row's marks, as class names of the style sheet."""
    holds = {
        "reference": row.versus.is_reference,
        "front": row.versus.front,
        "noisy": row.numbers.noisy,
        "alarm": row.versus.wrong,
    }
    return tuple(word for word, it_does in holds.items() if it_does)


def ranking(group: Group) -> Grid:
    """Return the rows of a group, fastest first, with their differences from the reference."""
    if group.world:
        return _table("simulated", f"Memory of rank 0 of {group.world}", SIMULATED, group.rows)
    return _table("ranking", "Ranking", _columns(group), group.rows)


def others(groups: Sequence[Group], first: int) -> Grid:
    """Return the rows of the groups from index ``first``, each with its own reference."""
    rows = [
        (row, index + 1, group.unlike if row is group.rows[0] else "")
        for index, group in enumerate(groups)
        for row in group.rows
        if index >= first
    ]
    columns = [Column("Group", lambda entry: entry[1], "count")]
    columns += [_of_entry(column) for column in RANKING]
    columns += [Column("Differs from group 1 in", lambda entry: entry[2])]
    marks = [_marks(row) for row, _, _ in rows]
    return tabulate("others", "Other groups", columns, rows, marks=marks, note=NOTES["ranking"])


def _of_entry(column: Column) -> Column:
    """Adapt a column of the ranking to all rows; a simulated row has no times to show."""
    simulated = {c.head: c.take for c in SIMULATED}

    def take(entry: tuple[Row, int, str]) -> Any:
        row = entry[0]
        return simulated.get(column.head, _nothing)(row) if row.spec.world else column.take(row)

    return dataclasses.replace(column, take=take)


def _nothing(row: Row) -> None:
    return None


def _columns(group: Group) -> list[Column]:
    """Return the ranking's columns; rows of another number of processes have a note."""
    columns = [detail(c) if c is PEAK and group.meter == "cuda" else c for c in RANKING]
    if len({row.spec.processes for row in group.rows}) == 1:
        return columns
    usual = group.reference.spec.processes

    def noted(row: Row) -> str:
        count = row.spec.processes
        own = [] if count == usual else [f"{count} process{'es' * (count > 1)}"]
        return ", ".join([*own, *filter(None, [flags(row)])])

    counts = Column("Processes", lambda r: r.spec.processes, "count", detail=True)
    return [*columns[:2], counts, *columns[2:-1], dataclasses.replace(FLAGS, take=noted)]


def group_grids(group: Group) -> dict[str, Grid]:
    """Return every table of one group, by key."""
    rows = group.rows
    compared = [] if group.world else rows
    trained = [] if group.draws else compared
    grids = [
        dataclasses.replace(ranking(group), key="ranking"),
        _table("effects", "Effect of each part", EFFECTS, effects(group) if compared else []),
        _table(
            "drawing_phases" if group.draws else "phases",
            _of_each_phase(group),
            DRAWING_PHASES if group.draws else PHASES,
            rows,
        ),
        _table("split", "Memory at the peak", SPLIT, _traced(rows)),
        _table("host", "Memory on the host", HOST_SPLIT, [r for r in rows if fullest_host(r)]),
        _table("memory", "Memory, all counts", MEMORY, rows),
        _table("time", "Time", TIME, rows),
        _table("types", "Precision", TYPES, [r for r in rows if derive.types(r.first.evidence)]),
        _table("parity", "Same computation?", PARITY, trained),
        _table("drawn", "Same samples?", DRAWN, [r for r in rows if r.drawn]),
        _table("siblings", "Rows that alter the same", SIBLINGS, _with_siblings(trained)),
        _table("predicted", "Predicted and measured", PREDICTED, [r for r in rows if r.predicted]),
        _table(
            "calibrated",
            "Time, predicted by this device's calibration",
            CALIBRATED,
            [r for r in rows if r.calibrated],
        ),
        _table("parts", "Predicted and traced, by category", CATEGORY_ERRORS, _categories(rows)),
        _table("buckets", "DeepSpeed buckets", BUCKETS, [r for r in rows if zero_block(r)]),
        _table("gathers", "FSDP2 gathering", GATHERS, [r for r in rows if gathering(r)]),
    ]
    return {grid.key.removeprefix("drawing_"): grid for grid in grids}


def _of_each_phase(group: Group) -> str:
    """Return the title of the phase table, by the meter's count."""
    return f"{'Live tensors' if group.meter == 'cuda' else 'Resident mark'} of each phase"


def _categories(rows: list[Row]) -> list[tuple[Row, PredictedCategory]]:
    return [
        (row, category) for row in rows if row.predicted for category in row.predicted.categories
    ]


def _with_siblings(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.versus.sibling]


def _traced(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.numbers.parameters_bytes is not None]


def unfinished_grid(unfinished: list[Unfinished]) -> Grid:
    """Return the planned rows without a number to rank."""
    return _table("unfinished", "Did not finish", UNFINISHED, unfinished)

"""Tables of a report, as text cells. Every format renders these same cells.

A ``Column`` (columns.py) says once how a number is headed, taken from a row and formatted. A
``Grid`` is a table ready to be drawn: a column that no row has a value for is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.report import derive, units
from harness.report.columns import (
    BUCKETS,
    HOST_SPLIT,
    MEMORY,
    PARITY,
    PARTS,
    PHASES,
    PREDICTED,
    RANKING,
    SHORT,
    SIMULATED,
    SPLIT,
    TIME,
    TYPES,
    UNFINISHED,
    Column,
    fullest_host,
    marks,
    zero_block,
)
from harness.report.effects import EFFECTS, effects
from harness.report.predicted import Part
from harness.report.rows import Group, Row, Unfinished

__all__ = ["Grid", "grid", "group_grids", "ranking", "short_ranking", "unfinished_grid"]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of text. ``marks`` holds for each line the words that describe it: reference,
    front, alarm, noisy. ``note`` explains the columns."""

    key: str
    title: str
    heads: list[str]
    kinds: list[str]
    lines: list[list[str]]
    marks: list[tuple[str, ...]] = field(default_factory=list)
    note: str = ""

    @property
    def folded(self) -> bool:
        """Whether it is shown only when asked for: details of the table before it."""
        return self.key == "parts"


NOTES = {
    "ranking": "Samples/s of the whole job: global batch over the median step. Peak: the fullest "
    "rank's highest phase. Front: no other row has both a lower peak and more samples/s. Noisy: "
    "(p90 - p10) / median above 20 %, or repetitions' medians more than 10 % apart.",
    "simulated": "Peak: rank 0's highest phase; smallest first. A step's time is computation "
    "alone.",
    "phases": "Highest of all ranks in each phase. Forward, backward and optimizer are from one "
    "untimed step; steady covers the timed steps. Colour: the share of the table's highest value.",
    "split": "Alive at the traced peak of one step on the fullest rank. EMA: and what else a "
    "strategy keeps beside the model (masks, gradients not sent yet). Workspace: temporaries, "
    "buckets, kernel scratch. Untraced: the measured peak beyond the traced tensors.",
    "host": "Tensors in host memory at the traced peak of one step, on the fullest rank: offloaded "
    "state is here.",
    "time": "Each step counts as its slowest rank's. Set-up: import to prepared; warm-up and "
    "compilation are not timed steps. Compile: torch.compile's own, within the warm-up, from an "
    "empty cache.",
    "parity": "Distance: the largest step's |a - b| / |b| to the reference row. A row that must "
    "not change the computation is equal within 1e-3, and DIFFERS beyond.",
    "buckets": "As the engine used them, in elements, and MiB at the type the row computes in.",
    "predicted": "Predicted by tracing the same set-up and step without memory, on this machine, "
    "in a process of its own. Step: live tensors at the peak of one later step, against the run's "
    "own trace (rank 0). Worst category: of those above 5 % of that peak, the one with the largest "
    "error. Run: the whole run, against Peak; on a GPU both hold cuBLAS's workspaces; without one "
    "Peak is a process's resident high-water mark, which has libraries' scratch in it that no "
    "tensor holds. Reserved, on a GPU: in the allocator's mode that ran (expandable segments or "
    "not).",
    "types": "Read back from the trained model and its optimizer. Updated weights wider than the "
    "model's are a master copy.",
    "effects": "Two rows that differ in one part only: what adding this part did.",
}


def grid(key: str, title: str, columns: Sequence[Column], rows: Sequence[Any]) -> Grid:
    """The table of ``rows``; columns without any value are left out."""
    taken = [(c, [c.take(row) for row in rows]) for c in columns]
    kept = [(c, values) for c, values in taken if any(v not in (None, "") for v in values)]
    cells = [units.column(c.kind, values) for c, values in kept]
    ranked = bool(rows) and isinstance(rows[0], Row)
    return Grid(
        key=key,
        title=title,
        heads=[c.head for c, _ in kept],
        kinds=[c.kind for c, _ in kept],
        lines=[list(line) for line in zip(*cells, strict=True)],
        marks=[marks(row) for row in rows] if ranked else [() for _ in rows],
        note=NOTES.get(key, ""),
    )


def ranking(group: Group) -> Grid:
    """Rows of a group, fastest first, with their differences to the reference."""
    if group.world:
        return grid("simulated", f"Memory of rank 0 of {group.world}", SIMULATED, group.rows)
    return grid("ranking", "Ranking", _with_processes(RANKING, group), group.rows)


def short_ranking(group: Group) -> Grid:
    """The ranking for a terminal of 100 columns."""
    if group.world:
        return ranking(group)
    return grid("ranking", "Ranking", SHORT, group.rows)


def _with_processes(columns: Sequence[Column], group: Group) -> list[Column]:
    """Say on how many processes a row ran, where rows differ in it."""
    if len({row.spec.processes for row in group.rows}) == 1:
        return list(columns)
    return [*columns[:2], Column("Processes", lambda r: r.spec.processes, "count"), *columns[2:]]


def group_grids(group: Group) -> dict[str, Grid]:
    """Every table of one group, by key."""
    rows = group.rows
    compared = [] if group.world else rows
    grids = [
        dataclasses.replace(ranking(group), key="ranking"),
        grid("effects", "What each part does", EFFECTS, effects(group) if compared else []),
        grid("phases", "Peak of each phase", PHASES, rows),
        grid("split", "What the peak is made of", SPLIT, _split_rows(rows)),
        grid("host", "What the host holds", HOST_SPLIT, [r for r in rows if fullest_host(r)]),
        grid("memory", "Memory, all counts", MEMORY, rows),
        grid("time", "Time", TIME, rows),
        grid("types", "Precision", TYPES, [r for r in rows if derive.types(r.first.evidence)]),
        grid("parity", "Same computation?", PARITY, compared),
        grid("predicted", "Predicted and measured", PREDICTED, [r for r in rows if r.predicted]),
        grid("parts", "Predicted and traced, by category", PARTS, _parts(rows)),
        grid("buckets", "DeepSpeed buckets", BUCKETS, [r for r in rows if zero_block(r)]),
    ]
    return {g.key: g for g in grids}


def _parts(rows: list[Row]) -> list[tuple[Row, Part]]:
    return [(row, part) for row in rows if row.predicted for part in row.predicted.parts]


def _split_rows(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.numbers.parameters_bytes is not None]


def unfinished_grid(unfinished: list[Unfinished]) -> Grid:
    """Planned rows without a number to rank."""
    return grid("unfinished", "Did not finish", UNFINISHED, unfinished)

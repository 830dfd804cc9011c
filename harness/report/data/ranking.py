"""What the noise leaves of a ranking: the floor that a group of rows has, and the ranks in it."""

from __future__ import annotations

import dataclasses

import numpy as np

from harness.report.data.rows import Group, Row
from harness.report.figures.floor import Floor, Runs, borrowed, floor_of, margin_shares

__all__ = ["lent_floor", "own_floor", "ranked"]


def own_floor(rows: list[Row], reference: Row) -> Floor | None:
    """What rows that do the same work tell of their noise; None where none of them ran twice, or
    in a simulated world, whose times are not compared."""
    return None if reference.spec.world else floor_of(_runs(rows), reference.label)


def lent_floor(group: Group, others: list[Group]) -> Floor | None:
    """The group's own noise floor, else that of the first group on the same device, else None."""
    if group.floor or group.world:
        return group.floor
    able = (g for g in others if g.floor and (g.device, g.meter) == (group.device, group.meter))
    lender = next(able, None)
    if lender is None:
        return None
    spec = lender.reference.spec
    source = f"{spec.model} at batch {spec.global_batch}"
    return borrowed(lender.floor, source, _runs(group.rows), group.reference.label)


def _runs(rows: list[Row]) -> dict[str, Runs]:
    return {row.label: row.runs for row in rows}


def _alike(rows: list[Row]) -> list[int]:
    """For each row, the number of rows before it that the noise does not tell from it."""
    floor = rows[0].floor if rows else None
    if floor is None:
        return [0] * len(rows)
    logs = np.log([row.numbers.step_seconds_median for row in rows])
    shares = np.array([margin_shares(floor, row.runs) for row in rows])
    margins = ((shares[:i] + shares[i]).max(1, initial=0.0) ** 0.5 for i in range(len(rows)))
    return [int(np.sum(abs(logs[:i] - logs[i]) <= m)) for i, m in enumerate(margins)]


def ranked(rows: list[Row]) -> list[Row]:
    """Each row behind all that are faster beyond the noise; as listed where none is known."""
    ranks = [1 + index - alike for index, alike in enumerate(_alike(rows))]
    return [
        dataclasses.replace(row, versus=dataclasses.replace(row.versus, rank=rank))
        for row, rank in zip(rows, ranks, strict=True)
    ]

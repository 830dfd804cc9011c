"""The columns of FSDP2's table: what becomes of gathered weights, and how far ahead they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.report.data.grid import Column
from harness.report.data.rows import Row
from harness.report.rendering.columns.values import RECIPE

__all__ = ["GATHERS", "gathering"]


def gathering(row: Row) -> dict[str, Any]:
    """What FSDP2 showed of its gathering in the watched step; empty of another engine."""
    shown = (facts for facts in row.first.evidence.values() if "most_groups_ahead" in facts)
    return next(shown, {})


def _after_forward(row: Row) -> str:
    """What becomes of a block's weights behind its forward."""
    kept = gathering(row)["reshard_after_forward"]
    return {True: "freed", False: "kept"}.get(kept) or f"cut among {kept}"


def _in(fact: str, phase: str) -> Callable[[Row], Any]:
    return lambda row: gathering(row).get(fact, {}).get(phase)


GATHERS = (
    RECIPE,
    Column("Prefetch", lambda r: str(gathering(r)["prefetch"])),
    Column("Behind forward", _after_forward),
    Column("Whole at once", lambda r: gathering(r)["most_groups_at_once"], "count"),
    Column("Groups", lambda r: gathering(r)["groups"], "count"),
    Column("Ahead in forward", _in("most_groups_ahead", "forward"), "count"),
    Column("Ahead in backward", _in("most_groups_ahead", "backward"), "count"),
    Column("Gathered MiB in forward", _in("gathered_bytes", "forward"), "mib"),
    Column("Gathered MiB in backward", _in("gathered_bytes", "backward"), "mib"),
)

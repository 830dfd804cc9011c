"""Facts of the environment that rows were measured in, as text, and which of them differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from harness.report.data.rows import Row
from harness.report.figures import units

__all__ = ["IGNORED", "differing", "listed", "merged"]

IGNORED = ("changed_files",)
"""Facts that change whenever a file is edited between two runs, and explain no number."""
MOST = 20
"""Values of a fact that are listed."""


def merged(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Each fact's distinct values over all results of ``rows``, in the order met."""
    values: dict[str, dict[str, None]] = {}
    for row in rows:
        for result in row.results:
            for name, value in flat(result.environment):
                values.setdefault(name, {})[value] = None
    return {name: list(distinct) for name, distinct in values.items()}


def differing(rows: Iterable[Row]) -> dict[str, list[str]]:
    """The facts in which rows that are compared with each other do not agree."""
    return {n: v for n, v in merged(rows).items() if len(v) > 1 and n not in IGNORED}


def listed(values: Sequence[str]) -> str:
    """Values of a fact as text; of more than ``MOST`` the first, and how many more."""
    more = [f"{len(values) - MOST} more"] if len(values) > MOST else []
    return " / ".join([*values[:MOST], *more])


def flat(facts: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Facts as (name, text); a nested one is named with its parent's name: versions.torch."""
    pairs: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            pairs += flat(value, f"{prefix}{name}.")
        elif name.endswith("_bytes") and isinstance(value, (int, float)):
            pairs.append((prefix + name, units.gib(value)))
        else:
            pairs.append((prefix + name, units.NONE if value is None else str(value)))
    return pairs

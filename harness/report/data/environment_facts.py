"""The environment that rows were measured in: facts as text, and those that are not one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.report import units
from harness.report.rows import Row

__all__ = ["differing", "merged"]

# Editing a file between two runs changes it, and it explains no number.
PASSING = ("changed_files",)


def merged(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Each fact's distinct values over all results of ``rows``, in the order met."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        for result in row.results:
            for name, value in flat(result.environment):
                found.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in found.items()}


def differing(rows: Iterable[Row]) -> dict[str, list[str]]:
    """The facts in which rows that are compared with each other do not agree."""
    return {n: v for n, v in merged(rows).items() if len(v) > 1 and n not in PASSING}


def flat(facts: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Facts as (name, text); those inside others are named after both, as in versions.torch."""
    found: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            found += flat(value, f"{before}{name}.")
        elif name.endswith("_bytes") and isinstance(value, (int, float)):
            found.append((before + name, units.gib(value)))
        else:
            found.append((before + name, units.NONE if value is None else str(value)))
    return found

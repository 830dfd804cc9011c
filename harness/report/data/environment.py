"""Facts of the measurement environment as text, their differences, and the network of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from harness.report.data.rows import Group, Row
from harness.report.figures import derive, units
from harness.result import Result, Wire

IGNORED = ("changed_files",)
"""Facts that change whenever a file is edited, and explain no number."""
MOST = 20
"""Values of a fact that are listed."""


def merged(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Return each fact's distinct values over all results of ``rows``, in order of appearance."""
    values: dict[str, dict[str, None]] = {}
    for row in rows:
        for result in row.results:
            for name, value in flat(result.environment):
                values.setdefault(name, {})[value] = None
    return {name: list(distinct) for name, distinct in values.items()}


def differing(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Return the facts with several values among compared rows."""
    return {n: v for n, v in merged(rows).items() if len(v) > 1 and n not in IGNORED}


def listed(values: Sequence[str]) -> str:
    """Return values of a fact as text; above ``MOST``, the first ones and the number of others."""
    more = [f"{len(values) - MOST} more"] if len(values) > MOST else []
    return " / ".join([*values[:MOST], *more])


def flat(facts: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return facts as (name, text); a nested one has its parent's name: versions.torch."""
    pairs: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            pairs += flat(value, f"{prefix}{name}.")
        elif name.endswith("_bytes") and isinstance(value, (int, float)):
            pairs.append((prefix + name, units.gib(value)))
        else:
            pairs.append((prefix + name, units.NONE if value is None else str(value)))
    return pairs


# ---- nodes ----
# Rows on several nodes: the network between them, and steps in which it paused.


PAUSE = 10
"""Multiple of the median from which a step counts as a network pause.

A link that was down for 8 s and came back shows in one step alone, and the row is ok.
"""
LONG_PAUSE = (3, 5.0)
"""A smaller multiple, for a step that is also this many seconds longer than the median."""


def paused_steps(result: Result) -> int:
    """Return the timed steps of a multi-node row beyond ``PAUSE`` or ``LONG_PAUSE``."""
    steps = derive.step_seconds(result)
    if result.spec.nodes == 1 or not steps:
        return 0
    median = derive.quantile(steps, 0.5)
    times, seconds = LONG_PAUSE
    long = max(times * median, median + seconds)
    return sum(step > min(PAUSE * median, long) for step in steps)


def paused_rows(rows: Sequence[Row]) -> list[str]:
    """Return the label and count of rows with such steps."""
    counts = {row.label: sum(map(paused_steps, row.results)) for row in rows}
    of = {row.label: row.numbers.timed_steps for row in rows}
    return [f"{name} {count} of {of[name]}" for name, count in counts.items() if count]


def between(group: Group) -> str:
    """Return the nodes of a group's rows and their network; empty if all ran on one node."""
    results = [r for row in group.rows for r in row.results if r.spec.nodes > 1]
    if not results:
        return ""
    counts = " or ".join(str(n) for n in sorted({r.spec.nodes for r in results}))
    wires = dict.fromkeys(_words(r.wire) for r in results if r.wire)
    text = f"; between them {' / '.join(wires)}" if wires else ""
    single = any(row.spec.nodes == 1 for row in group.rows)
    some = " (rows of one process on one)" if single else ""
    return f"On {counts} nodes{some}{text}. Host memory is that of the fullest node."


def _words(wire: Wire) -> str:
    speed, wait = f"{wire.bandwidth / 1e9:.3g}", f"{wire.latency_seconds * 1e3:.3g}"
    return f"{speed} GB/s, {wait} ms an all-reduce ({wire.backend})"

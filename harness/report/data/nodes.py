"""Of rows on several nodes: which, the network between them, and steps in which it paused."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.data.rows import Group, Row
from harness.report.figures import derive
from harness.result import Result, Wire

__all__ = ["between", "paused_rows", "paused_steps"]

PAUSE = 10
"""Medians from which on a step is no slow step: a link that was down for 8 s and came back shows in
one step alone, and the row is ok."""
LONG_PAUSE = (3, 5.0)
"""Of slow steps fewer medians say it, where the step is so many seconds longer than one."""


def paused_steps(result: Result) -> int:
    """Timed steps of a row on several nodes that took over ``PAUSE`` or ``LONG_PAUSE``."""
    steps = derive.step_seconds(result)
    if result.spec.nodes == 1 or not steps:
        return 0
    median = derive.quantile(steps, 0.5)
    times, seconds = LONG_PAUSE
    long = max(times * median, median + seconds)
    return sum(step > min(PAUSE * median, long) for step in steps)


def paused_rows(rows: Sequence[Row]) -> list[str]:
    """Label and count of the rows with such steps."""
    counts = {row.label: sum(map(paused_steps, row.results)) for row in rows}
    of = {row.label: row.numbers.timed_steps for row in rows}
    return [f"{name} {count} of {of[name]}" for name, count in counts.items() if count]


def between(group: Group) -> str:
    """The nodes of a group's rows and the network between them; empty where all ran on one."""
    results = [r for row in group.rows for r in row.results if r.spec.nodes > 1]
    if not results:
        return ""
    counts = " or ".join(str(n) for n in sorted({r.spec.nodes for r in results}))
    wires = dict.fromkeys(_words(r.wire) for r in results if r.wire)
    told = f"; between them {' / '.join(wires)}" if wires else ""
    single = any(row.spec.nodes == 1 for row in group.rows)
    some = " (rows of one process on one)" if single else ""
    return f"On {counts} nodes{some}{told}. Host memory is that of the fullest node."


def _words(wire: Wire) -> str:
    speed, wait = f"{wire.bandwidth / 1e9:.3g}", f"{wire.latency_seconds * 1e3:.3g}"
    return f"{speed} GB/s, {wait} ms an all-reduce ({wire.backend})"

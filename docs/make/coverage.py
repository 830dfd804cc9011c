"""Coverage of the stated ranges: each figure of a public row, by the range of all other sources.

    python -m docs.make.coverage

A row's memory is held to the range that rows of all other trainers and authors give; its time to
the range of those that also used another kind of card.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from docs.make import public_rows
from harness.planner import uncertainty


class Held(NamedTuple):
    """One figure: its source, its relative error, and whether the range of others covers it."""

    source: str
    error: float
    inside: bool


def memory() -> list[Held]:
    """Return the memory of each plain row."""
    known = public_rows.residuals()
    found = []
    for one in known:
        others = [other for other in known if other.source != one.source]
        share = uncertainty.share_of(one.kind, others).share
        found.append(Held(one.source, one.error, abs(one.error) <= share))
    return found


def times() -> list[Held]:
    """Return each step time."""
    known = public_rows.timed()
    found = []
    for one in known:
        others = [o for o in known if o.source != one.source and o.family != one.family]
        reach = uncertainty.reach_of(others)
        inside = reach.low <= one.ratio <= reach.high
        found.append(Held(one.source, 1 / one.ratio - 1, inside))
    return found


def by_source(some: Sequence[Held]) -> dict[str, list[Held]]:
    found = defaultdict(list)
    for one in some:
        found[one.source].append(one)
    return dict(sorted(found.items()))


def mean(some: Sequence[Held]) -> float:
    """Return the mean over sources of the share of their rows inside: each source counts once."""
    return statistics.mean(
        statistics.mean(one.inside for one in mine) for mine in by_source(some).values()
    )


def told(name: str, some: Sequence[Held]) -> str:
    inside = sum(one.inside for one in some)
    middle = statistics.median(abs(one.error) for one in some)
    return f"{name}: {inside} of {len(some)} inside, median error {middle:.1%}"


if __name__ == "__main__":
    for name, some in (("memory", memory()), ("time", times())):
        sources = by_source(some)
        print(f"{told(name, some)}; {len(sources)} sources, each once: {mean(some):.0%} inside")
        for source, mine in sources.items():
            print(f"  {told(source, mine)}")
    low, high, sources = uncertainty.reach()
    print(f"time, all {sources} sources: {low:.2f} to {high:.2f} times the prediction")

"""Speeds compared with noise, and environments of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.report.data.rows import Group, Row
from harness.report.figures import derive, units
from harness.report.figures.floor import Floor, margin

SAME = "same"
"""Replaces a ratio of speeds whose whole interval lies within the noise floor."""
NOT_TOLD_APART = "not told apart"
"""Words for two speeds that the noise does not separate. They need not be equal."""
BUSY = 0.25
"""Noise floor above which speeds are not comparable, and no two count as the same."""
MOST_STEPS = 10_000
"""Timed steps above which only a quieter machine is recommended."""
ABSURD = 10.0
"""Noise floor, and ratio of the ends of an interval, above which its size has no meaning."""
IGNORED = ("changed_files",)
"""Environment facts that change whenever a file is edited, and explain no number."""
MOST = 20
"""Values of a fact that are listed."""


@dataclass(frozen=True)
class Pace:
    """Samples per second of a row relative to another's, and what the noise leaves of the ratio.

    ``low`` to ``high`` are the ratios that the noise leaves open. ``differs``: one is faster
    beyond the noise; None if no noise is known. ``told_apart``: the same, but without known noise
    the intervals of their steps (p10 to p90) must not overlap. ``same``: the whole interval lies
    in the noise floor.
    """

    ratio: float
    low: float
    high: float
    differs: bool | None
    told_apart: bool
    same: bool

    @property
    def least(self) -> float:
        """The ratio; the lowest that noise leaves open, unless the two are told apart or same."""
        return self.ratio if self.same or self.told_apart else self.low

    @property
    def is_unknown(self) -> bool:
        """True if the interval is too wide to have a meaning."""
        return self.high > ABSURD * self.low

    @property
    def shown(self) -> float | str:
        """The ratio, ``SAME``, or an interval if the noise does not separate the two."""
        if self.same:
            return SAME
        if self.differs is False:
            return "unknown" if self.is_unknown else f"{self.low:.2f}-{self.high:.2f}"
        return self.ratio


def pace(row: Row, base: Row) -> Pace:
    """Return the speed of ``row`` relative to ``base``, a row of the same group."""
    ours, theirs = row.numbers, base.numbers
    ratio = ours.samples_per_second / theirs.samples_per_second
    floor = row.floor
    if floor is None:
        ends, base_ends = ((n.step_seconds_p10, n.step_seconds_p90) for n in (ours, theirs))
        work = row.spec.global_batch / base.spec.global_batch
        low, high = work * base_ends[0] / ends[1], work * base_ends[1] / ends[0]
        return Pace(ratio, low, high, None, not derive.overlap(ends, base_ends), False)
    apart = abs(math.log(ours.step_seconds_median / theirs.step_seconds_median))
    noise = margin(floor, row.runs, base.runs)
    width = math.exp(noise)
    # A floor above BUSY contains differences that nobody would call the same.
    same = floor.fraction <= BUSY and apart + noise <= math.log1p(floor.fraction)
    return Pace(ratio, ratio / width, ratio * width, apart > noise, apart > noise, same)


def need_change(row: Row, base: Row) -> float | None:
    """Return the change as a fraction of the base's need; None if one need is unknown."""
    ours, theirs = row.numbers.need_bytes, base.numbers.need_bytes
    return ours / theirs - 1 if ours and theirs else None


def too_busy(group: Group) -> str:
    """Return a sentence on a noise floor above ``BUSY``, and the steps that would lower it.

    The noise of a median falls with the square root of the number of its steps.
    """
    steps, floor = group.reference.spec.steps, group.floor.fraction
    needed = steps * (math.log1p(floor) / math.log1p(BUSY)) ** 2
    way = "Measure again on a quieter machine."
    if needed <= MOST_STEPS:
        unit = 10 ** max(len(str(math.ceil(needed))) - 2, 0)  # rounded up to two digits
        needed = unit * math.ceil(needed / unit)
        way = f"About --steps {needed} (now {steps}), or a quieter machine, would do."
    return f"The machine was too busy to compare speeds: its noise floor is {_size(floor)}. {way}"


def _size(fraction: float) -> str:
    if fraction > ABSURD:
        return f"above {100 * ABSURD:.0f} %"
    return f"{units.one('percent', fraction)} %"


def noise_floor(group: Group) -> str:
    """Return the noise floor of a group and its basis in words; empty if no speeds are compared."""
    floor = group.floor
    if len(group.rows) < 2:
        return ""
    if floor is None:
        return (
            "Noise floor unknown: no row was measured twice, so small differences of "
            "speed may be noise. --noise-floor 3 measures the reference three times."
        )
    text = f"Noise floor {_size(floor.fraction)}"
    if floor.source:
        return (
            f"{text}, from another group, because no row of this one was measured twice: "
            f"{floor.source} {rests_on(floor)}. This group's floor may be larger."
        )
    return (
        f"{text}: {rests_on(floor)}. Speeds closer than that are {NOT_TOLD_APART}, and their "
        "ratio is an interval."
    )


def rests_on(floor: Floor) -> str:
    """Return the row that was measured repeatedly, its medians, and the number of others."""
    (label, medians), *others = floor.again.items()
    shown = ", ".join(units.column("ms", medians))
    more = f", and {len(others)} more row{'s' * (len(others) > 1)} more than once" if others else ""
    return f"{label} was measured {len(medians)} times ({shown} ms){more}"


# ---- environment ----


def environment(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Return each fact's distinct values over all results of ``rows``, in order of appearance."""
    values: dict[str, dict[str, None]] = {}

    def add(facts: dict[str, Any], prefix: str) -> None:
        for key, value in facts.items():
            name = prefix + key
            if isinstance(value, dict):
                add(value, f"{name}.")  # a nested fact has its parent's name: versions.torch
                continue
            size = key.endswith("_bytes") and isinstance(value, (int, float))
            text = units.gib(value) if size else units.NONE if value is None else str(value)
            values.setdefault(name, {})[text] = None

    for row in rows:
        for result in row.results:
            add(result.environment, "")
    return {name: list(distinct) for name, distinct in values.items()}


def listed(values: Sequence[str]) -> str:
    """Return values of a fact as text; above ``MOST``, the first ones and the number of others."""
    more = [f"{len(values) - MOST} more"] if len(values) > MOST else []
    return " / ".join([*values[:MOST], *more])

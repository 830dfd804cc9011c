"""Speeds compared with noise, and environments of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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


def differ(row: Row, base: Row) -> bool | None:
    """Return True if one of two rows is faster beyond the noise; None if no noise is known.

    For rows of two groups the larger noise counts.
    """
    if row.floor is None or base.floor is None:
        return None
    return abs(_log_ratio(row, base)) > _margin(row, base)


def told_apart(row: Row, base: Row) -> bool:
    """Return True if two speeds differ beyond the noise.

    If no noise is known, the intervals of their steps (p10 to p90) must not overlap.
    """
    known = differ(row, base)
    return not derive.overlap(_ends(row), _ends(base)) if known is None else known


def same(row: Row, base: Row) -> bool:
    """Return True if the whole interval of the difference of two speeds lies in the noise floor.

    A floor above ``BUSY`` contains differences that nobody would call the same.
    """
    if row.floor is None or base.floor is None:
        return False
    floor = min(row.floor.fraction, base.floor.fraction)
    return floor <= BUSY and abs(_log_ratio(row, base)) + _margin(row, base) <= math.log1p(floor)


def interval(row: Row, base: Row) -> tuple[float, float]:
    """Return the lowest and highest ratio of samples per second that the noise leaves open.

    If no noise is known, it is that of the steps' p10 and p90.
    """
    if row.floor is None or base.floor is None:
        (low, high), (base_low, base_high) = _ends(row), _ends(base)
        work = row.spec.global_batch / base.spec.global_batch
        return work * base_low / high, work * base_high / low
    found, width = _rate_ratio(row, base), math.exp(_margin(row, base))
    return found / width, found * width


def _margin(row: Row, base: Row) -> float:
    return max(margin(r.floor, row.runs, base.runs) for r in (row, base))


def _log_ratio(row: Row, base: Row) -> float:
    return math.log(row.numbers.step_seconds_median / base.numbers.step_seconds_median)


def _rate_ratio(row: Row, base: Row) -> float:
    return row.numbers.samples_per_second / base.numbers.samples_per_second


def _ends(row: Row) -> tuple[float, float]:
    return row.numbers.step_seconds_p10, row.numbers.step_seconds_p90


def ratio(row: Row, base: Row) -> float | str:
    """Return samples per second of ``row`` relative to ``base``.

    It is ``SAME`` within the noise floor, and an interval ("0.96-1.02") if the noise does not
    separate the two, unknown if one end is ``ABSURD`` times the other. If no noise is known, it
    is the plain ratio.
    """
    if same(row, base):
        return SAME
    if differ(row, base) is False:
        low, high = interval(row, base)
        return "unknown" if high > ABSURD * low else f"{low:.2f}-{high:.2f}"
    return _rate_ratio(row, base)


def is_busy(group: Group) -> bool:
    """Return True if the machine was too busy to compare the speeds of a group."""
    return group.floor is not None and group.floor.fraction > BUSY


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

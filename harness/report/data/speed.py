"""Speeds of rows against each other as a report tells them, where the noise floor has a say."""

from __future__ import annotations

import math

from harness.report.data.rows import Group, Row
from harness.report.figures import units
from harness.report.figures.floor import Floor, margin

__all__ = [
    "ALIKE",
    "NONE_SEEN",
    "differ",
    "margin_fraction",
    "noise_floor",
    "ratio",
    "rests_on",
    "times",
]

NONE_SEEN = "none seen"
"""In place of a ratio of speeds that the noise explains."""
ALIKE = "~1"
"""The same where there is little room."""
WIDE = 0.2
"""A floor from which on it is said what makes it smaller."""
ABSURD = 10.0
"""A floor above which its size says nothing more: nothing can be told."""


def differ(row: Row, base: Row) -> bool | None:
    """Whether one of two rows is faster beyond the noise; None where no noise is known. Of rows
    of two groups the larger noise counts."""
    if row.floor is None or base.floor is None:
        return None
    medians = [r.numbers.step_seconds_median for r in (row, base)]
    return abs(math.log(medians[0] / medians[1])) > _margin(row, base)


def margin_fraction(row: Row, base: Row) -> float | None:
    """The share up to which the speeds of two rows are not told apart; None: not known."""
    return None if row.floor is None or base.floor is None else math.exp(_margin(row, base)) - 1


def _margin(row: Row, base: Row) -> float:
    return max(margin(r.floor, row.runs, base.runs) for r in (row, base))


def ratio(row: Row, base: Row, alike: str = NONE_SEEN) -> float | str:
    """Samples a second of ``row`` as a multiple of ``base``'s; ``alike`` where the two are closer
    than their noise. Where no noise is known, the plain ratio."""
    if differ(row, base) is False:
        return alike
    return row.numbers.samples_per_second / base.numbers.samples_per_second


def times(row: Row, base: Row) -> str:
    """The same for a sentence: "x1.25", or "no difference seen"."""
    found = ratio(row, base)
    return "no difference seen" if isinstance(found, str) else f"x{found:.2f}"


def noise_floor(group: Group) -> str:
    """The noise floor of a group in a sentence or two, and what it rests on; empty where no
    speeds are compared."""
    if group.world or len(group.rows) < 2:
        return ""
    floor = group.floor
    if floor is None:
        return (
            "Noise floor unknown: no row was measured twice, so that a small difference of speed "
            "may be none (--noise-floor 3 measures the reference three times)."
        )
    return " ".join([_stated(floor), *_advice(floor)])


def _stated(floor: Floor) -> str:
    size, rests = _size(floor.fraction), rests_on(floor)
    if floor.source:
        return (
            f"Noise floor {size}, borrowed: no row of this group was measured twice, but of "
            f"{floor.source} {rests}. Its own may be larger."
        )
    return (
        f"Noise floor {size}: {rests}. Rows closer than that are not told apart: "
        f"'{NONE_SEEN}' stands for their difference."
    )


def _size(fraction: float) -> str:
    """In percent; what is beyond sense is not spelled out."""
    most = f"above {100 * ABSURD:.0f} %"
    return most if fraction > ABSURD else f"{units.one('percent', fraction)} %"


def rests_on(floor: Floor) -> str:
    """The row that was measured more than once, what came of it, and how many others were."""
    (label, medians), *others = floor.again.items()
    found = (
        f"{label} was measured {len(medians)} times ({', '.join(units.column('ms', medians))} ms)"
    )
    more = f", and {len(others)} more row{'s' * (len(others) > 1)} more than once" if others else ""
    return found + more


def _advice(floor: Floor) -> list[str]:
    if floor.fraction < WIDE:
        return []
    return ["A quieter machine, more --steps or a higher --noise-floor make it smaller."]

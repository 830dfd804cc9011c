"""What a reader decides by: the fastest row, the smallest, the best trade, and what fits.

Only rows that may be believed are named: a row whose loss DIFFERS though it should not is left
out, and ``sentences.warnings`` says so.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from harness.report.data import derive, units
from harness.report.data.rows import Group, Row

__all__ = ["Answer", "FastestThatFits", "answers", "fastest_that_fits"]

GPU_LIMITS_GIB = (8, 12, 16, 24, 40, 48, 80, 96, 141)
"""Sizes that GPUs come in."""
ROUND = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
"""Where no GPU gives the sizes: these, times a power of ten."""
MOST_LIMITS = 5
MOST_CLOSE = 3
"""Rows within the noise of the fastest that are named; more are counted."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question, the row that answers it (None: none does), and one sentence."""

    question: str
    row: Row | None
    text: str


@dataclass(frozen=True, kw_only=True)
class FastestThatFits:
    """The fastest row that fits in ``limit_bytes``; None: no row that was measured does.

    It is the answer up to ``upto_bytes`` as well, the next larger size asked about; None: for
    every larger size.
    """

    limit_bytes: float
    upto_bytes: float | None
    row: Row | None

    @property
    def sizes(self) -> str:
        """The sizes of memory in GiB for which this is the answer, in words."""
        low = f"{self.limit_bytes / units.GIB:g}"
        if self.upto_bytes is None:
            return f"from {low}"
        high = f"{self.upto_bytes / units.GIB:g}"
        return low if low == high else f"{low} to {high}"


def believable(group: Group) -> list[Row]:
    """Rows that an answer may name, fastest first."""
    return [row for row in group.rows if row.versus.parity != "DIFFERS"]


def weighed(group: Group) -> list[Row]:
    """Those of which it is known what a device must have free: what was not traced on a CPU is in
    no answer about memory."""
    return [row for row in believable(group) if row.numbers.need_bytes is not None]


# ---- which row is best ----


def answers(group: Group) -> list[Answer]:
    """Fastest, fastest unchanged computation, least memory, best trade."""
    if group.world:  # its times leave communication out, and its losses mean nothing
        return []
    rows = believable(group)
    if not rows:
        return [Answer(question="Fastest", row=None, text="no row can be believed")]
    fastest = _fastest(rows)
    if len(rows) == 1:
        return [fastest]
    return [fastest, *_fastest_with_same_loss(rows), *_of_memory(weighed(group), rows[0])]


def _of_memory(rows: list[Row], fastest: Row) -> list[Answer]:
    """Nothing where no two rows were weighed."""
    if len(rows) < 2:
        return []
    least = min(rows, key=lambda r: (r.numbers.need_bytes, -r.numbers.samples_per_second))
    answer = Answer(question="Least memory", row=least, text=_memory(least, fastest))
    return [answer, _best_trade(rows)]


def _fastest(rows: list[Row]) -> Answer:
    best, text = rows[0], _speed(rows[0])
    interval = _interval(best)
    close = [row.label for row in rows[1:] if derive.overlap(interval, _interval(row))]
    if close:
        text += f"; within its noise: {', '.join(close[:MOST_CLOSE])}"
        text += f" and {len(close) - MOST_CLOSE} more" if len(close) > MOST_CLOSE else ""
    return Answer(question="Fastest", row=best, text=text)


def _interval(row: Row) -> tuple[float, float]:
    return row.numbers.step_seconds_p10, row.numbers.step_seconds_p90


def _fastest_with_same_loss(rows: list[Row]) -> list[Answer]:
    """Nothing where it is the fastest of all."""
    exact = [row for row in rows if row.versus.parity in ("equal", "equal losses", "reference")]
    if not exact or exact[0] is rows[0]:
        return []
    return [Answer(question="Fastest, same loss", row=exact[0], text=_speed(exact[0]))]


def _speed(row: Row) -> str:
    numbers = row.numbers
    text = f"{units.one('rate', numbers.samples_per_second)} samples/s"
    if not row.versus.is_reference:
        text += f" (x{row.versus.speed_ratio:.2f})"
    return f"{text}, {_needs(row)}{_design(row)}"


def _needs(row: Row) -> str:
    """What a device must have free for a row; without a GPU that is the peak of its tensors."""
    size = row.numbers.need_bytes
    if size is None:
        return "its memory not traced"
    word = "needs" if row.first.meter == "cuda" else "peak"
    return f"{word} {units.gib(size)} a device"


def _memory(row: Row, fastest: Row) -> str:
    share = row.numbers.samples_per_second / fastest.numbers.samples_per_second
    text = _needs(row)
    change = row.versus.need_change_fraction
    if not row.versus.is_reference and change is not None:
        text += f" ({units.one('change', change)} %)"
    if row is not fastest:
        text += f", at {units.one('percent', share)} % of the fastest row's samples/s"
    return text + _design(row)


def _design(row: Row) -> str:
    """That a row computes something else than its reference, and how far its loss is away."""
    if row.versus.parity != "by design":
        return ""
    return f"; changes the computation by design (loss {row.versus.loss_distance:.1e} away)"


def _best_trade(rows: list[Row]) -> Answer:
    question = "Best trade"
    front = [row for row in rows if row.versus.front]
    points = [(r.numbers.need_bytes, r.numbers.samples_per_second) for r in front]
    best = derive.compromise(points)
    if best is None:
        text = "no other row saves a larger share of this one's memory than of its speed"
        return Answer(question=question, row=rows[0], text=text)
    row, top = front[best], max(front, key=lambda r: r.numbers.samples_per_second)
    slower = 1 - row.numbers.samples_per_second / top.numbers.samples_per_second
    saved = 1 - row.numbers.need_bytes / top.numbers.need_bytes
    text = (
        f"saves {units.one('percent', saved)} % of the fastest row's memory for "
        f"{units.one('percent', slower)} % of its speed, the largest margin on the front"
    )
    return Answer(question=question, row=row, text=text + _design(row))


# ---- what fits ----


def fastest_that_fits(group: Group) -> list[FastestThatFits]:
    """For each of a few sizes of device memory; sizes with the same answer are one."""
    rows = weighed(group)
    if group.world:
        return []
    fastest: list[FastestThatFits] = []
    for limit in limits(group):
        row = next((row for row in rows if row.numbers.need_bytes <= limit), None)
        if fastest and fastest[-1].row is row:
            fastest[-1] = dataclasses.replace(fastest[-1], upto_bytes=limit)
        else:
            fastest.append(FastestThatFits(limit_bytes=limit, upto_bytes=limit, row=row))
    if fastest and fastest[-1].row is not None:
        fastest[-1] = dataclasses.replace(fastest[-1], upto_bytes=None)
    return fastest


def limits(group: Group) -> list[float]:
    """Sizes of memory to answer for, in bytes: GPUs' own, or round values around the needs."""
    needs = sorted(row.numbers.need_bytes for row in weighed(group))
    if not needs:
        return []
    if group.meter == "cuda":
        return [gib * units.GIB for gib in GPU_LIMITS_GIB]
    sizes = sorted({_round_up(need / units.GIB) for need in needs if need > 0})
    keep = min(MOST_LIMITS, len(sizes))
    places = [round(i * (len(sizes) - 1) / max(keep - 1, 1)) for i in range(keep)]
    return [sizes[place] * units.GIB for place in places]


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next((r * power for r in ROUND if r * power >= value), 10 * power)

"""Answers that a reader decides by: the fastest row, the smallest, the best trade, and what fits.

A row whose loss DIFFERS unexpectedly is in no answer; ``sentences.wrong_rows`` lists it. Rows that
the noise does not separate are named beside the fastest measured one, and never called equally
fast. If it separates none, no row is the fastest. The best trade counts a row's speed at the
lowest value that the noise leaves open.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.data import lookup
from harness.report.data.rows import Group, Row
from harness.report.figures import derive, units

GPU_LIMITS_GIB = (8, 12, 16, 24, 40, 48, 80, 96, 141)
"""Memory sizes of GPUs, in GiB."""
ROUND = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
"""Sizes without a GPU: these values times a power of ten."""
MOST_LIMITS = 5
MANY = 100
"""Number of rows from which a part of a report shows only some."""
IN_FULL = 150
"""Rows that a report shows in detail, over all its groups."""
MOST_CLOSE = 3
"""Rows close to the fastest that are named; further ones are counted."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question, the row that answers it (None: no row), and one sentence."""

    question: str
    row: Row | None
    text: str


@dataclass(frozen=True, kw_only=True)
class FastestThatFits:
    """The fastest row that fits in ``limit_bytes``; ``row`` is None if no measured row does.

    The noise does not separate it from the rows in ``alike``, which fit too. The answer also
    holds up to ``upto_bytes``, the largest size with the same answer (None: any larger size).
    """

    limit_bytes: float
    upto_bytes: float | None
    row: Row | None
    alike: tuple[Row, ...] = ()

    @property
    def others(self) -> str:
        """The rows that are not separable from the fastest, for a sentence; empty without any."""
        return _beside(self.row, self.alike) if self.row else ""

    @property
    def sizes(self) -> str:
        """The memory sizes in GiB with this answer, in words."""
        low = f"{self.limit_bytes / units.GIB:g}"
        if self.upto_bytes is None:
            return f"from {low}"
        high = f"{self.upto_bytes / units.GIB:g}"
        return low if low == high else f"{low} to {high}"


def believable(group: Group) -> list[Row]:
    """Return the rows that an answer may name, fastest first."""
    return [row for row in group.rows if not row.versus.wrong]


def with_need(group: Group) -> list[Row]:
    """Return the believable rows with a known need; an untraced row on a CPU has none."""
    return [row for row in believable(group) if row.numbers.need_bytes is not None]


def in_full(groups: Sequence[Group]) -> list[tuple[Group, Group]]:
    """Return the first groups, with up to ``IN_FULL`` rows in detail, each with its ``in_detail``.

    A group's heading and answers count as one row. The rows of the other groups are in the CSV.
    """
    shown: list[tuple[Group, Group]] = []
    room = IN_FULL
    for group in groups:
        if room > 0:
            shown.append((group, in_detail(group, min(MANY, room))))
            room -= len(shown[-1][1].rows) + 1
    return shown


def in_detail(group: Group, most: int = MANY) -> Group:
    """Return the group with the ``most`` rows that fit in charts and detailed tables.

    They are the reference, the front, the fastest row for each memory size, and the fastest
    others.
    """
    if len(group.rows) <= most:
        return group
    front = [row for row in group.rows if row.versus.front]
    fits = [fit.row for fit in fastest_that_fits(group) if fit.row]
    wanted = {id(row) for row in [group.reference, *fits, *front][:most]}
    for row in group.rows:
        if len(wanted) < most:
            wanted.add(id(row))
    return dataclasses.replace(group, rows=[row for row in group.rows if id(row) in wanted])


def answers(group: Group) -> list[Answer]:
    """Return the fastest row, the fastest with equal results, the least memory and best trade."""
    rows = believable(group)
    if not rows:
        return [Answer(question="Fastest", row=None, text="no row can be believed")]
    fastest = _fastest(rows)
    if len(rows) == 1:
        return [fastest]
    found, needs = [fastest, *_fastest_with_same_loss(rows)], with_need(group)
    if len(needs) < 2:
        return found
    least = min(needs, key=lambda r: (r.numbers.need_bytes, -r.numbers.samples_per_second))
    answer = Answer(question="Least memory", row=least, text=_memory(least, rows[0]))
    return [*found, answer, _best_trade(needs)]


NONE_FASTER = "no difference in speed was measured"


def _fastest(rows: list[Row]) -> Answer:
    best, close = rows[0], _alike(rows[0], rows[1:])
    if len(rows) > 1 and len(close) == len(rows) - 1:
        return Answer(question="Fastest", row=None, text=NONE_FASTER)
    return Answer(question="Fastest", row=best, text=_speed(best) + _beside(best, close))


def _alike(best: Row, others: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows that the noise does not separate from ``best``."""
    return tuple(row for row in others if not lookup.told_apart(row, best))


def _beside(best: Row, close: Sequence[Row]) -> str:
    """Return the rows that are as fast as ``best``, and those that may or may not be."""
    same = [row for row in close if lookup.same(row, best)]
    unclear = [row for row in close if row not in same]
    text = f"; the same speed: {_names(same)}" if same else ""
    return text + (f"; {lookup.NOT_TOLD_APART} from it: {_names(unclear)}" if unclear else "")


def _names(rows: Sequence[Row]) -> str:
    more = f" and {len(rows) - MOST_CLOSE} more" if len(rows) > MOST_CLOSE else ""
    return ", ".join(row.label for row in rows[:MOST_CLOSE]) + more


def _fastest_with_same_loss(rows: list[Row]) -> list[Answer]:
    """Return the fastest row with equal results; nothing if it may be the fastest of all."""
    exact = [row for row in rows if row.versus.parity in ("equal", "equal losses", "reference")]
    if not exact or exact[0] is rows[0] or not lookup.told_apart(exact[0], rows[0]):
        return []
    what, best = "samples" if exact[0].drawn else "loss", exact[0]
    text = _speed(best) + _beside(best, _alike(best, exact[1:]))
    return [Answer(question=f"Fastest, same {what}", row=best, text=text)]


def _speed(row: Row) -> str:
    text = _pace(row)
    if row.versus.speed_same:
        text += ", same speed as the reference"
    elif row.versus.speed_differs is False:
        text += f", {lookup.NOT_TOLD_APART} from the reference"
    elif not row.versus.is_reference:
        text += f" (x{row.versus.speed_ratio:.2f})"
    return f"{text}, {_needs(row)}{_design(row)}"


def _needs(row: Row) -> str:
    """Return a row's need; without a GPU, the peak of its tensors."""
    size = row.numbers.need_bytes
    if size is None:
        return "its memory not traced"
    word = "needs" if row.first.meter == "cuda" else "peak"
    return f"{word} {units.gib(size)} a device"


def _memory(row: Row, fastest: Row) -> str:
    text = _needs(row)
    change = row.versus.need_change_fraction
    if not row.versus.is_reference and change is not None:
        text += f" ({units.one('change', change)} %)"
    if row is not fastest:
        text += f", {_share(row, fastest)}"
    return text + _design(row)


def _share(row: Row, fastest: Row) -> str:
    if lookup.same(row, fastest):
        return "as fast as the fastest row"
    if not lookup.told_apart(row, fastest):
        return f"its speed {lookup.NOT_TOLD_APART} from the fastest row's"
    share = row.numbers.samples_per_second / fastest.numbers.samples_per_second
    return f"at {units.one('percent', share)} % of the fastest row's samples/s"


def _design(row: Row) -> str:
    """Return the note that a row differs from its reference by design, and its distance."""
    if row.versus.parity != "by design":
        return ""
    what, far = "loss", row.versus.loss_distance
    if row.drawn:
        what, far = "samples", row.drawn.away
    return f"; changes the computation by design ({what} {far:.1e} away)"


def _best_trade(rows: list[Row]) -> Answer:
    found = _compromise(rows)
    if found is None:
        text = "no other row saves a larger share of this one's memory than of its speed"
        row: Row | None = rows[0]
        if any(r.versus.front for r in _alike(rows[0], rows[1:])):
            row, text = None, "no saving is surely larger than the speed it costs: too much noise"
        return Answer(question="Best trade", row=row, text=text)
    row, top = found
    text = (
        f"saves {units.one('percent', _saved(row, top))} % of the fastest row's memory "
        f"{_price(row, top)}, the largest margin on the front"
    )
    return Answer(question="Best trade", row=row, text=text + _design(row))


def _price(row: Row, top: Row) -> str:
    """Return the share of the fastest row's speed that a row costs, in words."""
    if lookup.same(row, top):
        return "at the same speed"
    bound = "" if lookup.told_apart(row, top) else "at most "
    return f"for {bound}{units.one('percent', 1 - _least_pace(row, top))} % of its speed"


def _least_pace(row: Row, top: Row) -> float:
    """Return a row's speed relative to the fastest's: the lowest that noise leaves open, unless
    the two are the same or told apart.
    """
    if row is top or lookup.same(row, top) or lookup.told_apart(row, top):
        return row.numbers.samples_per_second / top.numbers.samples_per_second
    return lookup.interval(row, top)[0]


def _compromise(rows: list[Row]) -> tuple[Row, Row] | None:
    """Return the best trade of the front and the front's fastest row; None without a trade."""
    front = [row for row in rows if row.versus.front]
    if not front:
        return None
    top = max(front, key=lambda row: row.numbers.samples_per_second)
    points = [(row.numbers.need_bytes, _least_pace(row, top)) for row in front]
    best = derive.compromise(points)
    return None if best is None else (front[best], top)


def _saved(row: Row, top: Row) -> float:
    return 1 - row.numbers.need_bytes / top.numbers.need_bytes


def headline(group: Group) -> str:
    """Return the group's answer in one sentence; empty if no row may be named."""
    rows = believable(group)
    if not rows:
        return ""
    best, count = rows[0], group.reference.spec.processes
    where = f"On {count} CPU process{'es' * (count > 1)}"
    if group.meter == "cuda":
        where = f"On {f'{count} x ' * (count > 1)}{group.device}"
    if len(rows) == 1:
        return f"{where}, {best.label}: {_pace(best)}, {_needs(best)}."
    if lookup.is_busy(group):
        return " ".join(filter(None, (lookup.too_busy(group), _smallest(group))))
    close = _alike(best, rows[1:])
    if len(close) == len(rows) - 1:
        small = _smallest(group)
        return f"{where}, {NONE_FASTER}{f'; {small}' if small else '.'}"
    text = f"{where}, {best.label} is fastest ({_pace(best)}, {_needs(best)}{_beside(best, close)})"
    found = _compromise(with_need(group))
    if found is not None:
        return f"{text}; {_traded(*found)}."
    if any(row.versus.front for row in close):
        return f"{text}."
    return f"{text}; no other row saves a larger share of its memory than of its speed."


def _traded(row: Row, top: Row) -> str:
    """Return what the best trade saves and at which speed, for the headline."""
    pace = f"{100 * _least_pace(row, top):.0f} % of its speed"
    if lookup.same(row, top):
        pace = "the same speed"
    elif not lookup.told_apart(row, top):
        pace = f"{pace} or more"
    return f"{row.label} needs {100 * _saved(row, top):.0f} % less memory at {pace}"


def _smallest(group: Group) -> str:
    """Return a sentence on the row with the least memory; empty if it saves nothing.

    It is compared with the reference, or with the largest row if it is the reference itself.
    """
    rows = with_need(group)
    if len(rows) < 2:
        return ""
    least, most = (of(rows, key=lambda row: row.numbers.need_bytes) for of in (min, max))
    base = group.reference if group.reference in rows and group.reference is not least else most
    saved = 100 * _saved(least, base)
    if saved < 0.5:
        return ""
    return f"{least.label} needs {saved:.0f} % less memory than {base.label}."


def _pace(row: Row) -> str:
    return f"{units.one('rate', row.numbers.samples_per_second)} samples/s"


def fastest_that_fits(group: Group) -> list[FastestThatFits]:
    """Return the fastest row for a few memory sizes; sizes with the same answer are merged."""
    rows = with_need(group)
    fastest: list[FastestThatFits] = []
    for limit in limits(group):
        able = [row for row in rows if row.numbers.need_bytes <= limit]
        best = able[0] if able else None
        if fastest and fastest[-1].row is best:
            fastest[-1] = dataclasses.replace(fastest[-1], upto_bytes=limit)
        else:
            alike = _alike(best, able[1:]) if best else ()
            fits = FastestThatFits(limit_bytes=limit, upto_bytes=limit, row=best, alike=alike)
            fastest.append(fits)
    if fastest and fastest[-1].row is not None:
        fastest[-1] = dataclasses.replace(fastest[-1], upto_bytes=None)
    return fastest


def limits(group: Group) -> list[float]:
    """Return memory sizes in bytes: those of GPUs, or round values around the needs."""
    needs = sorted(row.numbers.need_bytes for row in with_need(group))
    if not needs:
        return []
    if group.meter == "cuda":
        return [gib * units.GIB for gib in GPU_LIMITS_GIB]

    def rounded_up(value: float) -> float:
        power = 10.0 ** math.floor(math.log10(value))
        return next((r * power for r in ROUND if r * power >= value), 10 * power)

    sizes = sorted({rounded_up(need / units.GIB) for need in needs if need > 0})
    keep = min(MOST_LIMITS, len(sizes))
    places = [round(i * (len(sizes) - 1) / max(keep - 1, 1)) for i in range(keep)]
    return [sizes[place] * units.GIB for place in places]

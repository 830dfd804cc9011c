"""Answers that a reader decides by: the fastest row, the smallest, the best trade, and what fits.

A row whose loss DIFFERS unexpectedly is in no answer; ``sentences.errors`` lists it. Rows that
the noise does not separate are named beside the fastest measured one, and never called equally
fast. If it separates none, no row is the fastest. The best trade counts a row's speed at the
lowest value that the noise leaves open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.data import lookup
from harness.report.data.rows import Group, Row
from harness.report.figures import derive, units

MOST_CLOSE = 3
"""Rows close to the fastest that are named; further ones are counted."""
NONE_FASTER = "no difference in speed was measured"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question, the row that answers it (None: no row), and one sentence."""

    question: str
    row: Row | None
    text: str


def believable(group: Group) -> list[Row]:
    """Return the rows that an answer may name, fastest first."""
    return [row for row in group.rows if not row.versus.wrong]


def with_need(group: Group) -> list[Row]:
    """Return the believable rows with a known need; an untraced row on a CPU has none."""
    return [row for row in believable(group) if row.numbers.need_bytes is not None]


def answers(group: Group) -> list[Answer]:
    """Return the fastest row, the fastest with equal results, the least memory and best trade."""
    rows = believable(group)
    if not rows:
        return [Answer(question="Fastest", row=None, text="no row can be believed")]
    best, close = rows[0], _alike(rows[0], rows[1:])
    found = [Answer(question="Fastest", row=best, text=_speed(best) + _beside(best, close))]
    if len(rows) == 1:
        return found
    if len(close) == len(rows) - 1:
        found = [Answer(question="Fastest", row=None, text=NONE_FASTER)]
    exact = [row for row in rows if row.versus.parity in ("equal", "equal losses", "reference")]
    if exact and exact[0] is not best and lookup.told_apart(exact[0], best):
        question = f"Fastest, same {'samples' if exact[0].drawn else 'loss'}"
        text = _speed(exact[0]) + _beside(exact[0], _alike(exact[0], exact[1:]))
        found.append(Answer(question=question, row=exact[0], text=text))
    needs = with_need(group)
    if len(needs) < 2:
        return found
    least = min(needs, key=lambda r: (r.numbers.need_bytes, -r.numbers.samples_per_second))
    text = needs_words(least)
    if least is not needs[0]:
        text += f", {_change(least, needs[0])} than {needs[0].label}, "
        text += _pace_against(least, needs[0])
    found.append(Answer(question="Least memory", row=least, text=text + _design(least)))
    return [*found, _best_trade(needs)]


def _best_trade(rows: list[Row]) -> Answer:
    found = _compromise(rows)
    if found is not None:
        row, top = found
        text = f"{_change(row, top)} than {top.label}, {_pace_against(row, top)}{_design(row)}"
        return Answer(question="Best trade", row=row, text=text)
    if any(r.versus.front for r in _alike(rows[0], rows[1:])):
        text = "no saving is surely larger than the speed it costs: too much noise"
        return Answer(question="Best trade", row=None, text=text)
    text = "no other row saves a larger share of this one's memory than of its speed"
    return Answer(question="Best trade", row=rows[0], text=text)


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
        return f"{where}, {best.label}: {_pace(best)}, {needs_words(best)}."
    smallest = _smallest(group)
    if lookup.is_busy(group):
        return " ".join(filter(None, (lookup.too_busy(group), smallest)))
    close = _alike(best, rows[1:])
    if len(close) == len(rows) - 1:
        return f"{where}, {NONE_FASTER}{f'; {smallest}' if smallest else '.'}"
    numbers = f"{_pace(best)}, {needs_words(best)}{_beside(best, close)}"
    text = f"{where}, {best.label} is fastest ({numbers})"
    found = _compromise(with_need(group))
    if found is not None:
        return f"{text}; {found[0].label} needs {_change(*found)} {_pace_against(*found)}."
    if any(row.versus.front for row in close):
        return f"{text}."
    return f"{text}; no other row saves a larger share of its memory than of its speed."


def _smallest(group: Group) -> str:
    """Return a sentence on the row with the least memory; empty if it saves nothing.

    It is compared with the reference, or with the largest row if it is the reference itself.
    """
    rows = with_need(group)
    if len(rows) < 2:
        return ""
    least, most = (of(rows, key=lambda row: row.numbers.need_bytes) for of in (min, max))
    base = group.reference if group.reference in rows and group.reference is not least else most
    if 1 - least.numbers.need_bytes / base.numbers.need_bytes < 0.005:
        return ""
    return f"{least.label} needs {_change(least, base)} than {base.label}."


def front(group: Group) -> list[Row]:
    """Return the rows of the Pareto front, the smallest first.

    From its need on, each is the fastest row that fits.
    """
    return sorted(
        (row for row in group.rows if row.versus.front), key=lambda row: row.numbers.need_bytes
    )


def fits(row: Row, group: Group) -> str:
    """Return a row of the front, and the rows that fit too and may be as fast."""
    needs = [other for other in with_need(group) if other is not row]
    able = [r for r in needs if r.numbers.need_bytes <= row.numbers.need_bytes]
    return row.label + _beside(row, _alike(row, able))


# ---- words ----


def _alike(best: Row, others: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows that the noise does not separate from ``best``."""
    return tuple(row for row in others if not lookup.told_apart(row, best))


def _beside(best: Row, close: Sequence[Row]) -> str:
    """Return the rows that are as fast as ``best``, and those that may or may not be."""
    same = [row for row in close if lookup.same(row, best)]
    unclear = [row for row in close if row not in same]
    text = ""
    for words, rows in (("the same speed", same), (f"{lookup.NOT_TOLD_APART} from it", unclear)):
        more = f" and {len(rows) - MOST_CLOSE} more" if len(rows) > MOST_CLOSE else ""
        names = ", ".join(row.label for row in rows[:MOST_CLOSE])
        text += f"; {words}: {names}{more}" if rows else ""
    return text


def _pace(row: Row) -> str:
    return f"{units.one('rate', row.numbers.samples_per_second)} samples/s"


def _speed(row: Row) -> str:
    text = _pace(row)
    if row.versus.speed_same:
        text += ", same speed as the reference"
    elif row.versus.speed_differs is False:
        text += f", {lookup.NOT_TOLD_APART} from the reference"
    elif not row.versus.is_reference:
        text += f" (x{row.versus.speed_ratio:.2f})"
    return f"{text}, {needs_words(row)}{_design(row)}"


def needs_words(row: Row) -> str:
    """Return a row's need; without a GPU, the peak of its tensors."""
    size = row.numbers.need_bytes
    if size is None:
        return "its memory not traced"
    word = "needs" if row.first.meter == "cuda" else "peak"
    return f"{word} {units.gib(size)} a device"


def _change(row: Row, base: Row) -> str:
    """Return how much less memory a row needs than ``base``."""
    share = 1 - row.numbers.need_bytes / base.numbers.need_bytes
    return f"{abs(100 * share):.0f} % {'less' if share >= 0 else 'more'} memory"


def _pace_against(row: Row, top: Row) -> str:
    """Return a row's speed as a share of a faster row's, in words."""
    if lookup.same(row, top):
        return "at the same speed"
    share = f"{100 * _least_pace(row, top):.0f} % of its speed"
    if lookup.told_apart(row, top):
        return f"at {share}"
    low, high = lookup.interval(row, top)
    return (
        f"at {share} or more" if high <= lookup.ABSURD * low else "at an unknown speed: too noisy"
    )


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


def _design(row: Row) -> str:
    """Return the note that a row differs from its reference by design, and its distance."""
    if row.versus.parity != "by design":
        return ""
    what, far = "loss", row.versus.loss_distance
    if row.drawn:
        what, far = "samples", row.drawn.away
    return f"; changes the computation by design ({what} {far:.1e} away)"

"""Answers that a reader decides by: the fastest row, the smallest, the best trade, and what fits.

A row whose loss DIFFERS unexpectedly is in no answer; ``sentences.errors`` lists it. Rows that
the noise does not separate are named beside the fastest measured one, and never called equally
fast. If it separates none, no row is the fastest. The best trade counts a row's speed at the
lowest value that the noise leaves open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.report.data import lookup
from harness.report.data.rows import Group, Row
from harness.report.figures import derive, units

MOST_CLOSE = 3
"""Rows close to the fastest that are named; further ones are counted."""
NONE_FASTER = "no difference in speed was measured"


class Answer(NamedTuple):
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
        return [Answer("Fastest", None, "no row can be believed")]
    best = rows[0]
    if len(rows) > 1 and not any(lookup.pace(row, best).told_apart for row in rows[1:]):
        found = [Answer("Fastest", None, NONE_FASTER)]
    else:
        found = [Answer("Fastest", best, _speed(best) + _beside(best, rows[1:]))]
    exact = [row for row in rows if row.versus.parity in ("equal", "equal losses", "reference")]
    if exact and lookup.pace(exact[0], best).told_apart:
        question = f"Fastest, same {'samples' if group.draws else 'loss'}"
        found.append(Answer(question, exact[0], _speed(exact[0]) + _beside(exact[0], exact[1:])))
    needs = with_need(group)
    if len(needs) < 2:
        return found
    least = min(needs, key=lambda r: (r.numbers.need_bytes, -r.numbers.samples_per_second))
    text = needs_words(least)
    if least is not needs[0]:
        text += f", {_trade(least, needs[0])}"
    return [*found, Answer("Least memory", least, text + _design(least)), _best_trade(needs)]


def _best_trade(rows: list[Row]) -> Answer:
    if found := _compromise(rows):
        return Answer("Best trade", found[0], _trade(*found) + _design(found[0]))
    if any(row.versus.front for row in _close(rows[0], rows[1:])):
        text = "no saving is surely larger than the speed it costs: too much noise"
        return Answer("Best trade", None, text)
    text = "no other row saves a larger share of this one's memory than of its speed"
    return Answer("Best trade", rows[0], text)


def headline(group: Group) -> str:
    """Return the group's answer in one sentence; empty if no row may be named."""
    rows = believable(group)
    if not rows:
        return ""
    best, count = rows[0], group.reference.spec.processes
    where = f"On {count} CPU process{'es' * (count > 1)}"
    if group.meter == "cuda":
        where = f"On {f'{count} x ' * (count > 1)}{group.device}"
    numbers = f"{_rate(best)}, {needs_words(best)}"
    if len(rows) == 1:
        return f"{where}, {best.label}: {numbers}."
    smallest, close = _smallest(group), _close(best, rows[1:])
    if group.floor and group.floor.fraction > lookup.BUSY:
        return " ".join(filter(None, (lookup.too_busy(group), smallest)))
    if len(close) == len(rows) - 1:
        return f"{where}, {NONE_FASTER}{f'; {smallest}' if smallest else '.'}"
    text = f"{where}, {best.label} is fastest ({numbers}{_beside(best, close)})"
    if found := _compromise(with_need(group)):
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
    size = row.numbers.need_bytes
    able = [r for r in with_need(group) if r is not row and r.numbers.need_bytes <= size]
    return row.label + _beside(row, able)


# ---- words ----


def _close(best: Row, others: Sequence[Row]) -> list[Row]:
    """Return the rows that the noise does not separate from ``best``."""
    return [row for row in others if not lookup.pace(row, best).told_apart]


def _beside(best: Row, others: Sequence[Row]) -> str:
    """Return the rows that are as fast as ``best``, and those that may or may not be."""
    paces = [(row.label, lookup.pace(row, best)) for row in others]
    same = [name for name, pace in paces if pace.same and not pace.told_apart]
    unclear = [name for name, pace in paces if not pace.same and not pace.told_apart]
    text = ""
    for words, names in (("the same speed", same), (f"{lookup.NOT_TOLD_APART} from it", unclear)):
        more = f" and {len(names) - MOST_CLOSE} more" if len(names) > MOST_CLOSE else ""
        text += f"; {words}: {', '.join(names[:MOST_CLOSE])}{more}" if names else ""
    return text


def _rate(row: Row) -> str:
    return f"{units.one('rate', row.numbers.samples_per_second)} samples/s"


def _speed(row: Row) -> str:
    text = _rate(row)
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
    pace = lookup.pace(row, top)
    share = f"{100 * pace.least:.0f} % of its speed"
    if pace.same:
        return "at the same speed"
    if pace.told_apart:
        return f"at {share}"
    return "at an unknown speed: too noisy" if pace.is_unknown else f"at {share} or more"


def _trade(row: Row, top: Row) -> str:
    """Return the memory that the first row saves of the second's, and the speed that it costs."""
    return f"{_change(row, top)} than {top.label}, {_pace_against(row, top)}"


def _compromise(rows: list[Row]) -> tuple[Row, Row] | None:
    """Return the best trade of the front and the front's fastest row; None without a trade."""
    front = [row for row in rows if row.versus.front]
    if not front:
        return None
    top = max(front, key=lambda row: row.numbers.samples_per_second)
    paces = [1.0 if row is top else lookup.pace(row, top).least for row in front]
    needs = [row.numbers.need_bytes for row in front]
    best = derive.compromise(list(zip(needs, paces, strict=True)))
    return None if best is None else (front[best], top)


def _design(row: Row) -> str:
    """Return the note that a row differs from its reference by design, and its distance."""
    if row.versus.parity != "by design":
        return ""
    what, far = "loss", row.versus.loss_distance
    if row.samples_distance is not None:
        what, far = "samples", row.samples_distance
    return f"; changes the computation by design ({what} {far:.1e} away)"

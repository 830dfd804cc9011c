"""The sentences above a ranking: which row is named for what, and every number in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from tests.recount import measures as m
from tests.recount import predicted as p
from tests.recount import versus as v
from tests.recount.cells import GIB, Number, change, fault, percent
from tests.recount.raw import Group, Row

__all__ = ["answer_faults", "believable", "best", "fastest_within", "fits_faults"]
__all__ += ["prediction_faults"]

NUMBER = r"([+-]?\d[\d.]*(?:e[+-]\d+)?)"


def believable(group: Group) -> list[Row]:
    """Rows that may be named, fastest first."""
    rows = v.ranked(group)
    return [row for row in rows if v.parity(row) != "DIFFERS" and m.need_bytes(row) is not None]


# ---- which row is best ----


def _same_loss(group: Group) -> Row | None:
    words = ("equal", "equal losses", "reference")
    return next((row for row in believable(group) if v.parity(row) in words), None)


def _least(group: Group) -> Row:
    return min(believable(group), key=lambda r: (m.peak_bytes(r), -m.samples_per_second(r)))


def _fastest_of_front(group: Group) -> Row:
    return next(row for row in believable(group) if v.front(row))


def margins(group: Group, row: Row) -> tuple[float, float]:
    """Shares of the fastest row's memory and speed that a row saves and gives up."""
    top = _fastest_of_front(group)
    memory = 1 - m.peak_bytes(row) / m.peak_bytes(top)
    return memory, 1 - m.samples_per_second(row) / m.samples_per_second(top)


def _trade(group: Group) -> Row:
    """The row of the front that saves most memory for the speed it gives up."""

    def margin(row: Row) -> float:
        saved, slower = margins(group, row)
        return saved - slower

    row = max((row for row in believable(group) if v.front(row)), key=margin)
    return row if margin(row) > 0 else believable(group)[0]


best: dict[str, Callable[[Group], Row | None]] = {
    "Fastest": lambda group: believable(group)[0],
    "Fastest, same loss": _same_loss,
    "Least memory": _least,
    "Best trade": _trade,
}
"""Question -> the row that answers it."""


# ---- the numbers in an answer ----


def _known(group: Group, row: Row) -> dict[str, list[Number]]:
    """Pattern of words around numbers -> what the numbers are."""
    fastest = believable(group)[0]
    saved, slower = margins(group, row)
    share = m.samples_per_second(row) / m.samples_per_second(fastest)
    return {
        rf"{NUMBER} samples/s": [Number(m.samples_per_second(row), 1)],
        rf"\(x{NUMBER}\)": [Number(v.speed_ratio(row), 2)],
        rf"peak {NUMBER} GiB": [Number(m.peak_bytes(row) / GIB, 2)],
        rf"\({NUMBER} %\)": [change(v.peak_change_fraction(row) or 0.0)],
        rf"at {NUMBER} % of the fastest row's samples/s": [percent(share)],
        rf"saves {NUMBER} % of the fastest row's memory for {NUMBER} % of its speed": [
            percent(saved),
            percent(slower),
        ],
        rf"loss {NUMBER} away": [Number(v.loss_distance(row) or 0.0)],
    }


def answer_faults(text: str, group: Group) -> Iterator[str]:
    """What is wrong in "question: row: sentence"."""
    question, _, said = text.partition(": ")
    row = best[question](group)
    labels = sorted((r.label for r in group.rows), key=len, reverse=True)
    named = next((label for label in labels if said.startswith(f"{label}: ")), None)
    if row is None or named != row.label:
        yield f"{question} is {row and row.label}, not {named}"
        return
    said = said.removeprefix(f"{named}: ")
    for label in labels:  # others that are named: their digits are no numbers
        said = said.replace(label, "")
    yield from number_faults(said, _known(group, row), question)


def number_faults(said: str, known: dict[str, list[Number]], what: str) -> Iterator[str]:
    """Numbers that are not as recounted, and those that nothing here knows."""
    for pattern, numbers in known.items():
        found = re.search(pattern, said)
        if found:
            said = said.replace(found[0], "", 1)
            for text, number in zip(found.groups(), numbers, strict=True):
                if fault(text, number):
                    yield f"{what}: {fault(text, number)}"
    if re.search(r"\d", said):
        yield f"{what}: no rule here for the numbers in {said!r}"


# ---- what fits ----


GPU_SIZES = (8, 12, 16, 24, 40, 48, 80, 96, 141)
ROUND = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


def sizes_of(group: Group) -> list[float]:
    """GiB that may be asked about: those of GPUs, or the round values next above a need."""
    if group.gpu:
        return list(GPU_SIZES)
    needs = [m.need_bytes(row) / GIB for row in believable(group)]
    steps = [step * 10.0**power for power in range(-4, 5) for step in ROUND]
    return sorted({min(step for step in steps if step >= need) for need in needs})


def fits_faults(lines: list[list[str]], group: Group) -> Iterator[str]:
    """Each line's row is the fastest that fits at either end of its sizes."""
    before, known = 0.0, sizes_of(group)
    ends = [float(n) for line in lines for n in re.findall(r"[\d.]+", line[0])]
    for size in ends:
        if all(abs(size - other) > 1e-6 * other for other in known):
            yield f"fits in {size}: none of the sizes {known}"
    if ends and abs(ends[0] - known[0]) > 1e-6:
        yield f"fits: the smallest size is {known[0]}, not {ends[0]}"
    for sizes, name, rate, need in lines:
        low, *high = [float(number) for number in re.findall(r"[\d.]+", sizes)]
        top = float("inf") if sizes.startswith("from") else (high or [low])[0]
        if low <= before:
            yield f"fits in {sizes}: sizes do not grow"
        before = top
        for size in (low, top):
            yield from _one_size(size, name, rate, need, group)


def fastest_within(size: float, group: Group) -> Row | None:
    """The fastest row that needs no more bytes."""
    return next((row for row in believable(group) if m.need_bytes(row) <= size), None)


def _one_size(size: float, name: str, rate: str, need: str, group: Group) -> Iterator[str]:
    row = fastest_within(size * GIB, group)
    if (row.label if row else "") != ("" if name.startswith("nothing measured") else name):
        yield f"fits in {size}: {row and row.label} is the fastest, not {name}"
    elif row:
        cells = {rate: Number(m.samples_per_second(row), 1), need: Number(m.need_bytes(row) / GIB)}
        yield from (f"fits in {size}: {fault(t, n)}" for t, n in cells.items() if fault(t, n))


# ---- how good the predictions were ----


def prediction_faults(text: str, group: Group) -> Iterator[str]:
    """What is wrong in the sentence on the errors of predictions: each clause has a median, the
    largest, and how many."""
    rows = [row for row in v.ranked(group) if p.prediction(row)]
    parts = [part for row in rows for part in p.parts(row)]
    clauses = {
        "tensors of a step": [p.step_error(row) for row in rows],
        "its categories": [part.error for part in parts],
        "whole run": [p.run_error(row) for row in rows],
    }
    largest = max(parts, key=lambda part: abs(part.error), default=None)
    for clause in text.partition(": ")[2].split("; "):
        name = next((name for name in clauses if clause.startswith(name)), None)
        if name:
            middle, worst, count = p.errors_of(clauses[name])
            yield from _clause(clause, name, middle, worst, count)
        elif re.fullmatch(r"\d+ values\)\.?", clause):
            yield from number_faults(clause, {rf"{NUMBER} values": [Number(len(parts))]}, clause)
        else:
            yield f"no rule here for {clause!r}"
    if parts and f"({largest.title} of {largest.row.label}" not in text:
        yield f"the largest error of a category is {largest.title} of {largest.row.label}"


def _clause(clause: str, name: str, middle: float, worst: float, count: int) -> Iterator[str]:
    known: dict[str, Any] = {
        rf"median error {NUMBER} %, largest {NUMBER} %": [percent(middle, 2), percent(worst, 2)],
        rf"\({NUMBER} rows\)": [Number(count)],
        rf"above {NUMBER} % of the peak": [Number(5)],
    }
    yield from number_faults(re.sub(r" \(\w+ \w* ?of .*", "", clause), known, name)

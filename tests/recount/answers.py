"""The sentences above a ranking: which row is named for what, and every number in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.recount import drawn, noise
from tests.recount import measures as m
from tests.recount import predicted as p
from tests.recount import versus as v
from tests.recount.cells import GIB, Number, change, fault, gib, percent
from tests.recount.pages import Table
from tests.recount.raw import Group, Row

__all__ = ["alike_within", "answer_faults", "best", "fastest_within", "fits_faults"]
__all__ += ["missing_answers", "prediction_faults"]

NUMBER = r"([+-]?\d[\d.]*(?:e[+-]\d+)?)"


def believable(group: Group) -> list[Row]:
    """Rows that may be named, fastest first."""
    return [row for row in v.ranked(group) if not v.wrong(row)]


def weighed(group: Group) -> list[Row]:
    """Those whose memory is known."""
    return [row for row in believable(group) if m.need_bytes(row) is not None]


# ---- which row is best ----


def _same_loss(group: Group) -> Row | None:
    """Nothing where it is the fastest of all."""
    words = ("equal", "equal losses", "reference")
    row = next((row for row in believable(group) if v.parity(row) in words), None)
    return None if row is believable(group)[0] else row


def _least(group: Group) -> Row | None:
    rows = weighed(group)
    key = [(m.need_bytes(row), -m.samples_per_second(row)) for row in rows]
    return rows[key.index(min(key))] if len(rows) > 1 else None


def _front(group: Group) -> list[Row]:
    return [row for row in weighed(group) if v.front(row)]


def margins(group: Group, row: Row) -> tuple[float, float]:
    """Shares of the fastest row's memory and speed that a row of the front saves and gives up."""
    top = _front(group)[0]
    memory = 1 - m.need_bytes(row) / m.need_bytes(top)
    return memory, 1 - m.samples_per_second(row) / m.samples_per_second(top)


def _trade(group: Group) -> Row | None:
    """The row of the front that saves most memory for the speed it gives up."""
    if len(weighed(group)) < 2:
        return None

    def margin(row: Row) -> float:
        saved, slower = margins(group, row)
        return saved - slower

    row = max(_front(group), key=margin)
    return row if margin(row) > 0 else weighed(group)[0]


best: dict[str, Callable[[Group], Row | None]] = {
    "Fastest": lambda group: believable(group)[0],
    "Fastest, same loss": lambda group: None if drawn.draws(group) else _same_loss(group),
    "Fastest, same samples": lambda group: _same_loss(group) if drawn.draws(group) else None,
    "Least memory": _least,
    "Best trade": _trade,
}
"""Question -> the row that answers it."""


# ---- what is said of it ----


def alike(row: Row, others: list[Row]) -> list[Row]:
    """Those that the noise does not tell from a row; where none is known, those whose steps spread
    over its steps."""
    if noise.floor_of(row.group):
        return [other for other in others if noise.differ(row, other) is False]
    low, high = (m.tenth(m.steps(row), end) for end in (1, 9))
    ends = [(m.tenth(m.steps(o), 1), m.tenth(m.steps(o), 9), o) for o in others]
    return [other for first, last, other in ends if first <= high and last >= low]


def names(rows: list[Row]) -> str:
    more = f" and {len(rows) - 3} more" * (len(rows) > 3)
    return ", ".join(row.label for row in rows[:3]) + more


def speed(row: Row) -> list[Any]:
    text: list[Any] = [Number(m.samples_per_second(row), 1), " samples/s"]
    if not row.is_reference:
        none = noise.differ(row, row.group.reference) is False
        text += [" (~1)"] if none else [" (x", Number(v.speed_ratio(row), 2), ")"]
    return [*text, ", ", *memory(row), *design(row)]


def memory(row: Row) -> list[Any]:
    if m.need_bytes(row) is None:
        return ["its memory not traced"]
    word = "needs " if row.group.gpu else "peak "
    return [word, gib(m.need_bytes(row)), " GiB a device"]


def design(row: Row) -> list[Any]:
    if v.parity(row) != "by design":
        return []
    if drawn.draws(row.group):
        far = f"{drawn.away(row)[0]:.1e}"
        return [f"; changes the computation by design (samples {far} away)"]
    far = f"{v.loss_distance(row):.1e}"
    return [f"; changes the computation by design (loss {far} away)"]


def _of_fastest(group: Group, row: Row) -> list[Any]:
    close = alike(row, believable(group)[1:])
    word = "no difference seen to" if noise.floor_of(group) else "within the spread of its steps:"
    return speed(row) + ([f"; {word} {names(close)}"] if close else [])


def _of_least(group: Group, row: Row) -> list[Any]:
    text, top = memory(row), believable(group)[0]
    less = v.need_change_fraction(row)
    text += [" (", change(less), " %)"] if less is not None and not row.is_reference else []
    if row is not top and noise.differ(row, top) is False:
        text += [", no difference seen to the fastest row's samples/s"]
    elif row is not top:
        part = m.samples_per_second(row) / m.samples_per_second(top)
        text += [", at ", percent(part), " % of the fastest row's samples/s"]
    return text + design(row)


def _of_trade(group: Group, row: Row) -> list[Any]:
    saved, slower = margins(group, row)
    if saved - slower <= 0:
        return ["no other row saves a larger share of this one's memory than of its speed"]
    price: list[Any] = [percent(slower), " % of its speed"]
    if noise.differ(row, _front(group)[0]) is False:
        price = ["no difference seen in speed"]
    text = ["saves ", percent(saved), " % of the fastest row's memory for ", *price]
    return [*text, ", the largest margin on the front", *design(row)]


SAID: dict[str, Callable[[Group, Row], list[Any]]] = {
    "Fastest": _of_fastest,
    "Fastest, same loss": lambda group, row: speed(row),
    "Fastest, same samples": lambda group, row: speed(row),
    "Least memory": _of_least,
    "Best trade": _of_trade,
}
"""Question -> the whole sentence on the row."""


def answer_faults(text: str, group: Group) -> Iterator[str]:
    """What is wrong in "question: row: sentence"."""
    question, _, said = text.partition(": ")
    row = best[question](group)
    labels = sorted((r.label for r in group.rows), key=len, reverse=True)
    named = next((label for label in labels if said.startswith(f"{label}: ")), None)
    if row is None or named != row.label:
        yield f"{question} is {row and row.label}, not {named}"
        return
    wrong = fault(said.removeprefix(f"{named}: "), tuple(SAID[question](group, row)))
    yield from [f"{question}: {wrong}"] if wrong else []


def missing_answers(questions: Sequence[str], group: Group) -> Iterator[str]:
    """Questions that a group answers, and that are not among those shown."""
    wanted = [] if group.world else [q for q, take in best.items() if take(group)]
    if list(questions) != wanted:
        yield f"answers to {wanted} are expected, {list(questions)} are given"


# ---- what fits ----


GPU_SIZES = (8, 12, 16, 24, 40, 48, 80, 96, 141)
ROUND = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
MOST_SIZES = 5


def sizes_of(group: Group) -> list[float]:
    """GiB that are asked about: those of GPUs; without one, of the round values next above a need,
    five that are evenly spread among them."""
    if group.gpu:
        return list(GPU_SIZES)
    needs = [m.need_bytes(row) / GIB for row in weighed(group)]
    steps = [step * 10.0**power for power in range(-4, 5) for step in ROUND]
    above = sorted({min(step for step in steps if step >= need) for need in needs if need > 0})
    kept = min(MOST_SIZES, len(above))
    return [above[round(k * (len(above) - 1) / max(kept - 1, 1))] for k in range(kept)]


def fastest_within(size: float, group: Group) -> Row | None:
    """The fastest row that needs no more bytes."""
    return next((row for row in weighed(group) if m.need_bytes(row) <= size), None)


def alike_within(size: float, group: Group) -> list[Row]:
    """Those that fit as well, and that the noise does not tell from the fastest."""
    able = [row for row in weighed(group) if m.need_bytes(row) <= size]
    return alike(able[0], able[1:]) if able and noise.floor_of(group) else []


@dataclass
class Fits:
    """The fastest row from one size to another; ``others`` as fast at the first of them."""

    low: float
    high: float
    row: Row | None
    others: list[Row]

    def cells(self, last: bool, nothing: str) -> tuple[Any, ...]:
        low, high = f"{self.low:g}", f"{self.high:g}"
        if self.row is None:
            return (low if low == high else f"{low} to {high}", nothing, None, None)
        sizes = f"from {low}" if last else low if low == high else f"{low} to {high}"
        more = f"; no difference seen to {names(self.others)}" if self.others else ""
        rate, need = m.samples_per_second(self.row), m.need_bytes(self.row)
        return (sizes, self.row.label + more, Number(rate, 1), gib(need))


def fits_of(group: Group) -> list[Fits]:
    """Sizes with the same answer are one line."""
    found: list[Fits] = []
    for size in sizes_of(group):
        row = fastest_within(size * GIB, group)
        if found and found[-1].row is row:
            found[-1].high = size
        else:
            found.append(Fits(size, size, row, alike_within(size * GIB, group)))
    return found


def fits_faults(table: Table, group: Group) -> Iterator[str]:
    """Mismatches of the table of what fits, line by line."""
    every = fits_of(group)
    if len(table.lines) != len(every):
        yield f"{len(table.lines)} lines, {len(every)} recounted"
    nothing = "nothing measured" + " fits" * table.heads[0].startswith("Fits")
    for line, found in zip(table.lines, every, strict=False):
        cells = found.cells(found is every[-1], nothing)
        for head, text, cell in zip(table.heads, line, cells, strict=True):
            wrong = fault(text, cell)
            yield from [f"fits in {line[0]}, {head}: {wrong}"] if wrong else []


# ---- how good the predictions were ----


def prediction_faults(text: str, group: Group) -> Iterator[str]:
    """What is wrong in the sentence on the errors of predictions."""
    wrong = fault(text, tuple(_of_predictions(group)))
    yield from [f"the errors of predictions: {wrong}"] if wrong else []


def _of_predictions(group: Group) -> list[Any]:
    """Each clause has a median, the largest, and of how many; nothing without a prediction."""
    rows = [row for row in v.ranked(group) if p.prediction(row)]
    parts = [part for row in rows for part in p.parts(row)]
    worst = max(parts, key=lambda part: abs(part.error), default=None)
    meter = "the allocator's highest" if group.gpu else "the resident mark"
    own = "tensors of a step, against the run's own trace, which is no independent measure"
    where = worst and f"{worst.title} of {worst.row.label}; {len(parts)} values"
    clauses = [
        _clause(own, map(p.step_error, rows)),
        _clause("its categories above 5 % of the peak", [part.error for part in parts], where),
        _clause("tensors kept in host memory", map(p.hosted_error, rows)),
        _clause(f"whole run, against {meter}, an independent measure", map(p.run_error, rows)),
        _clause("reserved", map(p.reserved_error, rows)),
    ]
    none = [row.label for row in rows if p.prediction(row)["method"] == "none"]
    clauses += [[f"not predicted: {', '.join(none)}"]] if none else []
    said: list[Any] = []
    for clause in filter(None, clauses):
        said += ["; ", *clause] if said else ["Predicted without running: ", *clause]
    return [*said, "."] if said else []


def _clause(name: str, errors: Iterable[float | None], where: str | None = None) -> list[Any]:
    known = [error for error in errors if error is not None]
    if not known:
        return []
    middle, worst, count = p.errors_of(known)
    ends = ["median error ", percent(middle, 2), " %, largest ", percent(worst, 2), " %"]
    return [f"{name}: ", *ends, f" ({where or f'{count} rows'})"]


def needs_predictions(group: Group) -> bool:
    """Whether there is anything to say of predictions."""
    return bool(_of_predictions(group))

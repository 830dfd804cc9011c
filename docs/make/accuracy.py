"""Tables of docs/explanation/accuracy.md: errors of all kept rows, and the rows that are missed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from docs.make import coverage, gpu_rows, public_rows
from harness.system import cards

HEADS = ("figure", "rows", "median error", "largest", "within the stated range")
MISSES = ("row of docs/public-rows.yaml", "figure", "measured", "predicted", "error %")
Row = tuple[str, ...]


def _line(name: str, errors: Sequence[float], inside: int | None = None) -> Row:
    sizes = [abs(error) for error in errors]
    ends = [f"{statistics.median(sizes):.1%}", f"{max(sizes):.1%}"]
    return (name, str(len(sizes)), *ends, "-" if inside is None else str(inside))


def summary() -> Iterator[Row]:
    """Yield the lines of the table of errors."""
    for name, held in (("memory", coverage.memory()), ("step times", coverage.times())):
        inside = sum(one.inside for one in held)
        yield _line(f"public {name}, by other sources' range", [h.error for h in held], inside)
    for name, card in gpu_rows.SETS.items():
        some = list(gpu_rows.rows(name))
        for figure, found in gpu_rows.memory(some):
            if figure != "traced":
                yield _line(f"our {card}: {figure} memory", found)
        found, inside = gpu_rows.times(some, cards.find(card))
        if found:
            yield _line(f"our {card}: step times", found, inside)


def misses() -> Iterator[Row]:
    """Yield every public figure outside the range that all other sources give."""
    plain = [row for row in public_rows.rows() if public_rows.is_plain(row)]
    for row, held in zip(plain, coverage.memory(), strict=True):
        kind = public_rows.figure(row)
        if not held.inside:
            predicted = row.get("first", row["predicted"][kind])
            yield _miss(row["name"], f"{kind}, GiB", row[kind], predicted)
    timed = [(row, card) for row in public_rows.rows() for card in row.get("seconds", {})]
    for (row, card), held in zip(timed, coverage.times(), strict=True):
        if not held.inside:
            predicted = row["predicted"]["seconds"][card][0]
            yield _miss(row["name"], f"seconds, {card}", row["seconds"][card], predicted)


def _miss(name: str, kind: str, measured: float, predicted: float) -> Row:
    off = f"{100 * (predicted / measured - 1):+.0f}"
    return (name, kind, f"{measured:.2f}", f"{predicted:.2f}", off)

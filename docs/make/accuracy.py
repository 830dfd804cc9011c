"""Tables of docs/explanation/accuracy.md: errors of all kept rows, and the rows that are missed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from docs.make import gpu_rows, public_rows
from harness.planner.uncertainty import share_of
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
    for name, errors, inside in public_rows.memory():
        yield _line(f"public {name}", errors, inside)
    found, covered = zip(*public_rows.times(), strict=True)
    yield _line("public step times", found, sum(covered))
    for name, card in gpu_rows.SETS.items():
        some = list(gpu_rows.rows(name))
        for figure, found in gpu_rows.memory(some):
            if figure != "traced":
                yield _line(f"our {card}: {figure} memory", found)
        found, inside = gpu_rows.times(some, cards.find(card))
        if found:
            yield _line(f"our {card}: step times", found, inside)


def misses() -> Iterator[Row]:
    """Yield every public figure outside its stated range."""
    making = public_rows.residuals()
    for row in public_rows.rows():
        got, name = row["predicted"], row["name"]
        if public_rows.is_plain(row):
            kind = public_rows.figure(row)
            if abs(public_rows.error(row)) > share_of(got["class"], making).share:
                yield _miss(name, f"{kind}, GiB", row[kind], row.get("first", got[kind]))
        for card, seconds in row.get("seconds", {}).items():
            best, low, high = got["seconds"][card]
            if not low <= seconds <= high:
                yield _miss(name, f"seconds, {card}", seconds, best)


def _miss(name: str, kind: str, measured: float, predicted: float) -> Row:
    off = f"{100 * (predicted / measured - 1):+.0f}"
    return (name, kind, f"{measured:.2f}", f"{predicted:.2f}", off)

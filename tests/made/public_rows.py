"""What others measured on GPUs (``docs/public-peaks.yaml``), what was predicted of it
(``docs/public-peaks.json``), and the tables of ``docs/models.md`` that say both. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from harness import ROOT
from tests.made.pages import line

FILE = ROOT / "docs" / "public-peaks.yaml"
RECORD = ROOT / "docs" / "public-peaks.json"
PAGE = ROOT / "docs" / "models.md"
PREDICTED = ("predicted", "")
MEMORY = ("run", "source", "settings", "reserved", *PREDICTED, "between steps", *PREDICTED)
TIME = ("run", "card", "seconds a step", "predicted", "plus or minus", "", "within")
Found = dict[str, Any]
"""Of a row: GiB ``reserved`` and ``between`` two steps, the ``operations`` that its host issues,
and ``seconds``, [predicted, plus or minus] by card; or ``why`` nothing was predicted."""


def rows() -> list[dict[str, Any]]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def kept() -> dict[str, Found]:
    """What is kept, by the rows' names."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def memory_table(record: Mapping[str, Found]) -> Iterator[str]:
    yield line(MEMORY)
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|"
    for row in rows():
        got = record[row["name"]]
        known = {"reserved": row.get("reserved", row.get("peak")), "between": row.get("between")}
        if any(known.values()):
            pairs = (_pair(known[key], got.get(key)) for key in known)
            yield line((*_told_of(row), *(cell for pair in pairs for cell in pair)))


def _told_of(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["name"], row["source"], row["settings"]


def _pair(known: float | None, got: float | None) -> tuple[str, str, str]:
    """Measured, predicted, error."""
    error = f"{100 * (got / known - 1):+.1f} %" if known and got else ""
    return f"{known:.3f}" if known else "-", f"{got:.3f}" if got else "not predicted", error


def time_table(record: Mapping[str, Found]) -> Iterator[str]:
    yield line(TIME)
    yield "|---|---|--:|--:|--:|--:|---|"
    for name, card, known, (got, spread) in timed(record):
        numbers = [f"{seconds:.3f}" for seconds in (known, got, spread)]
        error = f"{100 * (got / known - 1):+.0f} %"
        within = "yes" if covered(known, got, spread) else "no"
        yield line((name, card, *numbers, error, within))


def timed(record: Mapping[str, Found]) -> Iterator[tuple[str, str, float, list[float]]]:
    """(row, card, measured seconds, [predicted, plus or minus]) of every row with a time."""
    for row in rows():
        for card, known in row.get("seconds", {}).items():
            if "why" not in record[row["name"]]:
                yield row["name"], card, known, record[row["name"]]["seconds"][card]


def covered(known: float, got: float, spread: float) -> bool:
    """Whether what was measured lies in the stated uncertainty."""
    return abs(known - got) <= spread

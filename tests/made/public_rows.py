"""What others measured on GPUs (``docs/public-peaks.yaml``), what was predicted of it
(``docs/public-peaks.json``), and the tables of ``docs/explanation/accuracy.md`` and
``docs/reference/public-rows.md`` and ``public-times.md``. No torch."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from harness import ROOT
from harness.planner.speed.rates import RECOMPUTING, SLOWEST
from harness.planner.speed.roofline import REACH
from harness.planner.uncertainty import CLASSES, Residual, share_of
from tests.made.pages import line

FILE = ROOT / "docs" / "public-peaks.yaml"
RECORD = ROOT / "docs" / "public-peaks.json"
PAGE = ROOT / "docs/explanation/accuracy.md"
ROWS_PAGE = ROOT / "docs/reference/public-rows.md"
TIMES_PAGE = ROOT / "docs/reference/public-times.md"
PREDICTED = ("predicted", "")
KINDS = ("reserved", "allocated", "between steps")
WHOLE = "whole run"
"""The ``figure`` of a row whose peak also counts encoding, loading or saving. No range is made
from it."""
NEAR = "near"
"""The key of a row whose recipe differs from its source in a way that is known. No range is made
from it."""
HELD = "held"
"""The key of a row that came when the ranges were made. None is made from it: it tests them."""
TOLD = ("settings", "source")
MEMORY = ("run", *(cell for kind in KINDS for cell in (kind, *PREDICTED)), *TOLD)
RUNS = ("run", "figure", "whole run", "step and set-up predicted", "", *TOLD)
UNLIKE = ("run", "figure", "measured", "predicted", "", "what differs", *TOLD)
COUNTS = ("figures", "rows", "settings blind", "seen before", "covered", "predicted once",
          "covered", "median error")  # fmt: skip
SEEN = ("rows", "memory", "median error", "covered", "times", "median error", "covered")
WHEN = ("seen before", "predicted once, afterwards", "predicted once, held from the ranges")
TIME = ("run", "card", "seconds a step", "predicted", "from", "to", "", "within")
Found = dict[str, Any]
"""Of a row: GiB ``reserved``, ``allocated`` and ``between`` two steps, the ``operations`` that its
host issues, and ``seconds``, [predicted, from, to] by card; or ``why`` nothing was predicted.
"""


def rows() -> list[dict[str, Any]]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def kept() -> dict[str, Found]:
    """What is kept, by the rows' names."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def memory_table(record: Mapping[str, Found]) -> Iterator[str]:
    yield line(MEMORY)
    yield "|---|" + "--:|" * 3 * len(KINDS) + "---|---|"
    for row in rows():
        got = record[row["name"]]
        known = {name: row.get(name) for name in ("reserved", "allocated", "between")}
        if any(known.values()) and row.get("figure") != WHOLE and NEAR not in row:
            pairs = (_pair(known[key], got.get(key)) for key in known)
            cells = (cell for pair in pairs for cell in pair)
            yield line((row["name"], *cells, *(row[key] for key in TOLD)))


def whole_table(record: Mapping[str, Found]) -> Iterator[str]:
    """Rows whose figure is the peak of a whole run, against step and set-up alone."""
    yield line(RUNS)
    yield "|---|---|--:|--:|--:|---|---|"
    for row in rows():
        if row.get("figure") == WHOLE:
            kind = _kind(row)
            pair = _pair(row[kind], record[row["name"]].get(kind))
            yield line((row["name"], kind, *pair, *(row[key] for key in TOLD)))


def near_table(record: Mapping[str, Found]) -> Iterator[str]:
    """Rows of memory whose recipe differs from their source, with what differs."""
    yield line(UNLIKE)
    yield "|---|---|--:|--:|--:|---|---|---|"
    for row in rows():
        if NEAR in row and (kind := _kind(row)) in row:
            pair = _pair(row[kind], record[row["name"]].get(kind))
            yield line((row["name"], kind, *pair, row[NEAR], *(row[key] for key in TOLD)))


def _kind(row: Mapping[str, Any]) -> str:
    """The peak that a row is compared by: what was reserved if the source states it."""
    return "reserved" if "reserved" in row else "allocated"


def count_table(record: Mapping[str, Found]) -> Iterator[str]:
    """The number of rows of each class, of near recipes, of whole runs and of times, and how many
    their stated range covers. A range of memory is not meant for whole runs."""
    yield line(COUNTS)
    yield "|---|" + "--:|" * (len(COUNTS) - 1)
    for words, some in _groups(record).items():
        cells = [f"{len(some)}", f"{sum(row['settings'] == 'blind' for row, _, _ in some)}"]
        for after in (False, True):
            own = [ok for row, _, ok in some if bool(row.get("after")) == after]
            cells += [f"{len(own)}", f"{sum(own)}"] if own else ["-", "-"]
        middle = statistics.median(error for _, error, _ in some)
        yield line((words, *cells, f"{100 * middle:.1f} %"))


Judged = tuple[dict[str, Any], float, bool]
"""A row, its relative error, and whether the stated range covers it."""


def _groups(record: Mapping[str, Found]) -> dict[str, list[Judged]]:
    """Rows by class and kind of figure, in the order of the table."""
    known = residuals(record)
    groups: dict[str, list[Judged]] = {}
    for row in rows():
        got, kind = record[row["name"]], _kind(row)
        if kind not in row or "why" in got:
            continue
        error, of = row[kind] / got[kind] - 1, got.get("class", "one GPU")
        words = f"memory of steps, class {of}"
        if NEAR in row or row.get("figure") == WHOLE:
            words = "memory of near recipes" if NEAR in row else "memory of whole runs"
        covers = abs(error) <= share_of(of, known).share
        groups.setdefault(words, []).append((row, abs(got[kind] / row[kind] - 1), covers))
    named = {row["name"]: row for row in rows()}
    groups["step times"] = [
        (named[name], abs(found[0] / seconds - 1), covered(seconds, *found))
        for name, _, seconds, found in timed(record)
    ]
    order = [f"memory of steps, class {of}" for of in CLASSES]
    order += ["memory of near recipes", "memory of whole runs", "step times"]
    return {words: groups[words] for words in order if words in groups}


def _pair(known: float | None, got: float | None) -> tuple[str, str, str]:
    """Measured, predicted, error."""
    error = f"{100 * (got / known - 1):+.1f} %" if known and got else ""
    return *(f"{value:.3f}" if value else "-" for value in (known, got)), error


def time_table(record: Mapping[str, Found]) -> Iterator[str]:
    yield line(TIME)
    yield "|---|---|--:|--:|--:|--:|--:|---|"
    for name, card, known, found in timed(record):
        numbers = [f"{seconds:.3f}" for seconds in (known, *found)]
        error = f"{100 * (found[0] / known - 1):+.0f} %"
        within = "yes" if covered(known, *found) else "no"
        yield line((name, card, *numbers, error, within))


def timed(record: Mapping[str, Found]) -> Iterator[tuple[str, str, float, list[float]]]:
    """(row, card, measured seconds, [predicted, from, to]) of every row with a time."""
    for row in rows():
        for card, known in row.get("seconds", {}).items():
            if "why" not in record[row["name"]]:
                yield row["name"], card, known, record[row["name"]]["seconds"][card]


def counted(row: Mapping[str, Any]) -> bool:
    """Whether ranges are made from a row of memory."""
    return row.get("figure") != WHOLE and NEAR not in row and not row.get(HELD)


def residuals(record: Mapping[str, Found]) -> list[Residual]:
    """Of every row of memory its class, its model and its error: of what was reserved, or, where
    that is not known, of what was allocated."""
    return [one for _, one in of_rows(record)]


def of_rows(
    record: Mapping[str, Found], chosen: Callable[[Mapping[str, Any]], bool] = counted
) -> Iterator[tuple[dict[str, Any], Residual]]:
    """Each ``chosen`` row of memory, and its residual; by default those that make the ranges.

    A row that was corrected when its figure was known keeps its first error (``first``).
    """
    for row in rows():
        got = record[row["name"]]
        name = _kind(row)
        if name in row and "why" not in got and chosen(row):
            kind = got.get("class", "one GPU")
            error = round(row[name] / row.get("first", got[name]) - 1, 4)
            yield row, Residual(kind, row["run"]["model"], error)


def residuals_text(known: Sequence[Residual]) -> str:
    """The text of ``harness/planner/residuals.json``: a row a line."""
    return "[\n" + ",\n".join(f" {json.dumps(one)}" for one in known) + "\n]\n"


def class_table(known: Sequence[Residual]) -> Iterator[str]:
    """What each class of a prediction states, and how many of its rows that covers where its
    model's rows are left out."""
    yield line(("class", "what it is", "rows", "models", "largest error", "stated", "covered"))
    yield "|---|---|--:|--:|--:|--:|--:|"
    left = memory_left_out(known)
    for kind, words in CLASSES.items():
        own = [one for one in known if one.kind == kind]
        told, inside = share_of(kind, known), sum(ok for one, ok in left if one.kind == kind)
        worst = f"{100 * max(abs(one.error) for one in own):.1f} %" if own else "-"
        stated = f"+-{100 * told.share:.1f} %{', of all classes' if told.pooled else ''}"
        counts = (f"{told.rows}", f"{told.models}")
        yield line((kind, words, *counts, worst, stated, f"{inside} of {len(own)}"))


def seen_table(record: Mapping[str, Found]) -> Iterator[str]:
    """Errors and coverage of the rows that figures were chosen on or looked at with, of those that
    came after, and of those that were held from the ranges. Memory is covered by the range that
    all other models' rows give, and of rows that were held by the stated one."""
    found = list(of_rows(record))
    known = [one for _, one in found]
    left = [ok for _, ok in memory_left_out(known)]
    memory = [(_when(row), abs(one.error), ok) for (row, one), ok in zip(found, left, strict=True)]
    memory += [(_when(row), abs(one.error), abs(one.error) <= share_of(one.kind, known).share)
               for row, one in of_rows(record, held)]  # fmt: skip
    when = {row["name"]: _when(row) for row in rows()}
    times = [(when[name], abs(found[0] / known - 1), covered(known, *found))
             for name, _, known, found in timed(record)]  # fmt: skip
    yield line(SEEN)
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for words in WHEN:
        cells: list[str] = []
        for some in (memory, times):
            own = [(error, ok) for was, error, ok in some if was == words]
            middle = statistics.median(error for error, _ in own)
            cells += [f"{len(own)}", f"{100 * middle:.1f} %", f"{sum(ok for _, ok in own)}"]
        yield line((words, *cells))


def held(row: Mapping[str, Any]) -> bool:
    """Whether a row of a step's memory was held from the ranges."""
    return bool(row.get(HELD)) and row.get("figure") != WHOLE and NEAR not in row


def _when(row: Mapping[str, Any]) -> str:
    """The line of the table of a row."""
    if row.get(HELD) or NEAR in row:
        return WHEN[2]
    return WHEN[1] if row.get("after") else WHEN[0]


def memory_left_out(known: Sequence[Residual]) -> list[tuple[Residual, bool]]:
    """Each row, and whether the range that all other models' rows give covers it."""
    found = []
    for one in known:
        others = [other for other in known if other.model != one.model]
        found.append((one, abs(one.error) <= share_of(one.kind, others).share))
    return found


def covered(known: float, got: float, low: float, high: float) -> bool:
    """Whether what was measured lies in the stated range of what was predicted (``got``)."""
    return low <= known <= high


def kind_of(row: Mapping[str, Any], got: Found, total: float) -> str:
    """What decides the upper end of a step's range: the device, the host, or the host of a
    recomputing step."""
    again = "checkpoint" in row["run"]["recipe"]
    if (1 + REACH["compute"]) * total >= (RECOMPUTING if again else SLOWEST) * got["operations"]:
        return "device"
    return "recomputing" if again else "host"


def left_out(record: Mapping[str, Found]) -> dict[str, tuple[int, int]]:
    """Model -> how many of its times are within a range that all other models' rows give, and how
    many it has. Such a range is the narrowest that covers nine of ten of the others' of a kind."""
    named = {row["name"]: row for row in rows()}
    found = []
    for name, _, known, (got, *_) in timed(record):
        row, kept_of = named[name], record[name]
        kind = kind_of(row, kept_of, got)
        found.append((row["run"]["model"], kind, _reach(kind, known, got)))
    fields = {}
    for model in dict.fromkeys(model for model, *_ in found):
        own = [
            reach <= _nine_of_ten([r for m, k, r in found if m != model and k == kind])
            for one, kind, reach in found
            if one == model
        ]
        fields[model] = (sum(own), len(own))
    return fields


def _reach(kind: str, known: float, got: float) -> float:
    """By what factor a range must reach up, or down if the device decides, to cover a row."""
    return max(known / got, got / known) if kind == "device" else known / got


def _nine_of_ten(reaches: Sequence[float]) -> float:
    ordered = sorted(reaches)
    return ordered[-(-9 * len(ordered) // 10) - 1]

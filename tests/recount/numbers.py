"""The ten numbers of a ranking in a report.json against the same numbers from raw results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from tests.recount import noise
from tests.recount.raw import ResultSet, Row

SET_UP = ("load", "prepare")
CATEGORIES = ("parameters", "gradients", "optimizer_state", "ema", "activations", "workspace")
Rank = dict[str, Any]
"""What one process measured, as its raw result has it."""


def step_seconds_median(row: Row) -> float:
    return statistics.median([seconds for run in row.runs for seconds in run.steps])


def samples_per_second(row: Row) -> float:
    return row.spec["global_batch"] / step_seconds_median(row)


def speed_ratio(row: Row) -> float:
    return samples_per_second(row) / samples_per_second(row.group.reference)


def sizes(ranks: list[Rank], count: str) -> list[int]:
    """Every count of any phase of the ranks."""
    found = [phase[count] for rank in ranks for phase in rank["phases"].values()]
    return [size for size in found if size is not None]


def peak_bytes(row: Row) -> int | None:
    """The fullest instant of a training step: a GPU's allocator in its steps, else the trace."""
    found = []
    for rank in row.ranks:
        if rank["device"] != "cpu":
            steps = [p for name, p in rank["phases"].items() if name not in SET_UP]
            found += [phase["allocated"] for phase in steps]
        elif parts := rank["categories"]:
            found.append(sum(parts[name] for name in CATEGORIES) + parts.get("resident", 0))
    return max((size for size in found if size is not None), default=None)


def need_bytes(row: Row) -> int | None:
    """What a device must have free: on a GPU the largest of all counts of the whole run."""
    if not row.group.gpu:
        return peak_bytes(row)
    if not sizes(row.ranks, "process"):
        return None
    counts = ("allocated", "reserved", "process")
    return max(size for count in counts for size in sizes(row.ranks, count))


def need_change_fraction(row: Row) -> float | None:
    ours, theirs = need_bytes(row), need_bytes(row.group.reference)
    return ours / theirs - 1 if ours and theirs else None


def loss_distance(row: Row) -> float | None:
    """The largest step's abs(a - b) / abs(b) of any repetition."""
    theirs = row.group.reference.first["losses"]
    pairs = [pair for run in row.runs for pair in zip(run.data["losses"], theirs, strict=False)]
    if any(not (math.isfinite(a) and math.isfinite(b)) for a, b in pairs):
        return math.inf
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=None)


def ranked(row: Row) -> list[Row]:
    """Its group, fastest first."""
    return sorted(row.group.rows, key=samples_per_second, reverse=True)


def rank(row: Row) -> int:
    """The best place that the noise leaves: one more than the rows that are faster beyond it."""
    faster = ranked(row)[: ranked(row).index(row)]
    return 1 + sum(noise.differ(row, other) is not False for other in faster)


def last_rank(row: Row) -> int:
    """The worst place that the noise leaves."""
    place = 1 + ranked(row).index(row)
    return place + sum(noise.differ(row, other) is False for other in ranked(row)[place:])


def front(row: Row, wrong: set[str]) -> bool:
    """No other row that computed what it promised has both less memory and more samples/s."""
    able = [r for r in row.group.rows if r.label not in wrong and need_bytes(r) is not None]
    if row not in able:
        return False
    point = (need_bytes(row), samples_per_second(row))
    others = [(need_bytes(r), samples_per_second(r)) for r in able]
    return not any(o[0] <= point[0] and o[1] >= point[1] and o != point for o in others)


TEN: dict[str, tuple[str, Callable[..., Any]]] = {
    "step_seconds_median": ("numbers", step_seconds_median),
    "samples_per_second": ("numbers", samples_per_second),
    "peak_bytes": ("numbers", peak_bytes),
    "need_bytes": ("numbers", need_bytes),
    "speed_ratio": ("versus_reference", speed_ratio),
    "need_change_fraction": ("versus_reference", need_change_fraction),
    "rank": ("versus_reference", rank),
    "last_rank": ("versus_reference", last_rank),
    "front": ("versus_reference", front),
    "loss_distance": ("versus_reference", loss_distance),
}
"""Number -> the part of a row's entry that has it, and its function."""


def differs(found: Any, expected: Any) -> bool:
    """Return whether a value of the JSON is not the recounted one."""
    if expected is None or (isinstance(expected, float) and not math.isfinite(expected)):
        return found is not None
    if isinstance(expected, bool) or not isinstance(found, int | float):
        return found is not expected
    return not math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12)


def faults(data: dict[str, Any], results: ResultSet) -> Iterator[str]:
    """Yield a line for each of the ten numbers that the raw results do not give, and for each row
    that a report.json lacks or invents."""
    rows = {row.first["command"]: row for row in results.rows}
    for group in data["groups"]:
        wrong = {e["label"] for e in group["rows"] if e["versus_reference"]["parity"] == "DIFFERS"}
        for entry in group["rows"]:
            row = rows.pop(entry["command"], None)
            if row is None:
                yield f"{entry['label']}: no raw result"
                continue
            for name, (part, take) in TEN.items():
                expected = take(row, wrong) if name == "front" else take(row)
                if differs(entry[part][name], expected):
                    yield f"{row.label}, {name}: {entry[part][name]!r} is not {expected!r}"
    yield from (f"{row.label} is missing" for row in rows.values())

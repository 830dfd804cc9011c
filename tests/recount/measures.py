"""The definition of every number of a row, from raw results: bytes, seconds, plain fractions.

As docs/reading-a-report.md and the notes below the tables state them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tests.recount.raw import Row

__all__ = ["CATEGORIES", "PHASES"]

CATEGORIES = ("parameters", "gradients", "optimizer_state", "ema", "activations", "workspace")
PHASES = ("load", "prepare", "first_step", "forward", "backward", "optimizer", "steady")
PEAK_FLOPS = {"NVIDIA H100 80GB HBM3": {"bfloat16": 989e12, "float32": 67e12}}
"""Dense, by NVIDIA's data sheet of the H100 SXM5."""


# ---- time ----


def steps(row: Row) -> list[float]:
    return [seconds for run in row.runs for seconds in run.steps]


def tenth(values: Sequence[float], place: int) -> float:
    """The ``place``-th of nine cuts into tenths, linear between neighbours."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=10, method="inclusive")[place - 1]


def step_seconds_median(row: Row) -> float:
    return statistics.median(steps(row))


def noise_fraction(row: Row) -> float | None:
    times = steps(row)
    if len(times) < 2:
        return None
    return (tenth(times, 9) - tenth(times, 1)) / statistics.median(times)


def repeat_spread_fraction(row: Row) -> float | None:
    medians = sorted(statistics.median(run.steps) for run in row.runs)
    return medians[-1] / medians[0] - 1 if len(medians) > 1 else None


def noisy(row: Row) -> bool:
    """By the report's note: (p90 - p10) / median above 20 %, or repetitions 10 % apart."""
    return (noise_fraction(row) or 0) > 0.2 or (repeat_spread_fraction(row) or 0) > 0.1


def samples_per_second(row: Row) -> float:
    return row.spec["global_batch"] / step_seconds_median(row)


def flops_per_second(row: Row) -> float | None:
    return row.first["flops_per_step"] / step_seconds_median(row) or None


def flops_per_second_device(row: Row) -> float | None:
    flops = flops_per_second(row)
    return flops and flops / (row.spec.get("world") or len(row.first["ranks"]))


def types(row: Row) -> dict[str, Any]:
    """What the precision strategy read back."""
    return next((f for f in row.evidence.values() if f and f.get("compute_dtype")), {})


def precision(row: Row) -> str | None:
    facts = types(row)
    if facts.get("float8_products"):
        return "float8"
    kind = facts.get("compute_dtype")
    return "tf32" if kind == "float32" and facts.get("tf32") else kind


def mfu_fraction(row: Row) -> float | None:
    peak = PEAK_FLOPS.get(row.runs[0].device, {}).get(precision(row) or "")
    flops = flops_per_second_device(row)
    return flops / peak if peak and flops else None


def setup_seconds(row: Row) -> float:
    """From import to prepared, of the slowest rank."""
    parts = ("start", "load", "prepare")
    return max(sum(r["phase_seconds"].get(p, 0.0) for p in parts) for r in row.first["ranks"])


def warmup_seconds(row: Row) -> float:
    return max(sum(r["warmup_seconds"]) for r in row.first["ranks"])


def wall_seconds(row: Row) -> float | None:
    return row.first["launch"]["wall_seconds"] if row.first["launch"] else None


# ---- memory ----


def sizes(ranks: Sequence[dict[str, Any]], count: str, phase: str | None = None) -> list[int]:
    peaks = (p for r in ranks for name, p in r["phases"].items() if phase in (None, name))
    return [peak[count] for peak in peaks if peak.get(count) is not None]


def peak_of(ranks: Sequence[dict[str, Any]]) -> int | None:
    """The highest of any rank in any phase."""
    return max(sizes(ranks, "allocated"), default=None)


def peak_bytes(row: Row) -> int | None:
    return peak_of(row.ranks)


def peak_phase(row: Row) -> str | None:
    """The first phase, in the order of the raw file, that reaches the peak."""
    top = peak_bytes(row)
    names = dict.fromkeys(name for rank in row.ranks for name in rank["phases"])
    return next((n for n in names if top in sizes(row.ranks, "allocated", n)), None)


def need_bytes(row: Row) -> int | None:
    """What a device must have free: on a GPU the largest of all counts."""
    counts = ("allocated", "reserved", "process") if row.group.gpu else ("allocated",)
    return max((s for c in counts for s in sizes(row.ranks, c)), default=None)


def highest(count: str) -> Callable[[Row], int | None]:
    return lambda row: max(sizes(row.ranks, count), default=None)


def phase_peak(phase: str) -> Callable[[Row], int | None]:
    return lambda row: max(sizes(row.ranks, "allocated", phase), default=None)


def imbalance_ratio(row: Row) -> float | None:
    """The fullest rank's peak over the emptiest's."""
    ratios = []
    for run in row.runs:
        peaks = [peak_of([rank]) for rank in run.ranks]
        ratios += [max(peaks) / min(peaks)] if len(peaks) > 1 and all(peaks) else []
    return max(ratios, default=None)


def host_total_bytes(row: Row) -> int | None:
    trees = (run.data["launch"] and run.data["launch"]["tree_peak_bytes"] for run in row.runs)
    return max((t for t in trees if t), default=None)


def nvme_bytes(row: Row) -> int:
    return max(sum(rank["nvme_bytes"] for rank in run.ranks) for run in row.runs)


def highest_of_ranks(name: str) -> Callable[[Row], int]:
    return lambda row: max(rank[name] for rank in row.ranks)


def fullest(row: Row) -> dict[str, Any] | None:
    """The rank with the highest peak of those that traced a step."""
    traced = [rank for rank in row.ranks if rank["categories"]]
    return max(traced, key=lambda rank: peak_of([rank]) or 0, default=None)


def category(name: str) -> Callable[[Row], int | None]:
    return lambda row: (fullest(row) or {}).get("categories", {}).get(name)


def traced_total(rank: dict[str, Any]) -> int:
    return sum(rank["categories"][name] for name in CATEGORIES)


def untraced_raw_bytes(row: Row) -> int | None:
    rank = fullest(row)
    return None if rank is None else (peak_of([rank]) or 0) - traced_total(rank)


def untraced_bytes(row: Row) -> int | None:
    raw = untraced_raw_bytes(row)
    return raw if raw is None else max(raw, 0)

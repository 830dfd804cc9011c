"""The definition of every number of a row, from raw results: bytes, seconds, plain fractions.

As docs/explanation/noise-and-fairness.md and the notes below the tables state them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tests.recount.raw import Row, Run

CATEGORIES = ("parameters", "gradients", "optimizer_state", "ema", "activations", "workspace")
SET_UP = ("load", "prepare")
OF_A_PROCESS = ("cpu_seconds", "forced_switches", "minor_faults")
PHASES = ("load", "prepare", "first_step", "forward", "backward", "optimizer", "steady")
HOPPER = {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "tf32": 494e12}
PEAK_FLOPS = {"NVIDIA H100 80GB HBM3": HOPPER, "NVIDIA H200": HOPPER}
"""Dense, by NVIDIA's data sheets of the H100 SXM5 and of the H200, whose units are the same."""
Rank = dict[str, Any]
"""What one process measured, as its raw result has it."""


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


# ---- what the kernel counted in each timed step ----


def usage(run: Run) -> list[dict[str, float]]:
    """Step by step: seconds and machine-wide counts of the slowest rank, sums of all ranks' own;
    empty where a rank has no counts."""
    if not all(rank.get("step_usage") for rank in run.ranks):
        return []
    found = []
    for place in range(min(len(rank["step_seconds"]) for rank in run.ranks)):
        slow = max(run.ranks, key=lambda rank: rank["step_seconds"][place])
        whole = slow["step_usage"]
        own = {n: sum(r["step_usage"][n][place] for r in run.ranks) for n in OF_A_PROCESS}
        machine = {"busy": whole["busy_seconds"][place], "cores": whole["cores"]}
        found.append({"seconds": slow["step_seconds"][place], **machine, **own})
    return found


def is_disturbed(step: dict[str, float], best: dict[str, float]) -> bool:
    """By the page: others held 10 % of the cores with less than 25 % idle; or 10 % longer than the
    fastest with a share of the cores below 9 tenths of its, or forced switches far above."""
    room = step["seconds"] * step["cores"]
    if room and step["busy"]:
        others, idle = step["busy"] - step["cpu_seconds"], room - step["busy"]
        if others > 0.1 * room and idle < 0.25 * room:
            return True
    if step["seconds"] <= 1.1 * best["seconds"]:
        return False
    starved = step["cpu_seconds"] * best["seconds"] < 0.9 * best["cpu_seconds"] * step["seconds"]
    return starved or step["forced_switches"] > 20 + 2 * best["forced_switches"]


def disturbed_steps(row: Row) -> int | None:
    """Of all repetitions; None where one has no counts."""
    total = 0
    for run in row.runs:
        steps_of = usage(run)
        if not steps_of:
            return None
        best = min(steps_of, key=lambda step: step["seconds"])
        total += sum(is_disturbed(step, best) for step in steps_of)
    return total


def usage_median(name: str) -> Callable[[Row], float | None]:
    """The median step of all repetitions."""

    def take(row: Row) -> float | None:
        counts = [step[name] for run in row.runs for step in usage(run)]
        return statistics.median(counts) if counts else None

    return take


# ---- memory ----


def sizes(ranks: Sequence[Rank], count: str, phase: str | None = None) -> list[int]:
    peaks = (p for r in ranks for name, p in r["phases"].items() if phase in (None, name))
    return [peak[count] for peak in peaks if peak.get(count) is not None]


def on_host(rank: Rank) -> bool:
    """Whether host memory stood in for a device."""
    return rank["device"] == "cpu"


def traced_total(parts: dict[str, int]) -> int:
    return sum(parts[name] for name in CATEGORIES)


def step_peaks(ranks: Sequence[Rank]) -> dict[str, int]:
    """Phase -> live tensors on the fullest device: a GPU's allocator in the steps; without one the
    traced tensors at their fullest instant, in the phase in which it was."""
    found: dict[str, int] = {}
    for rank in (r for r in ranks if not on_host(r)):
        for phase, peak in rank["phases"].items():
            if phase not in SET_UP and peak["allocated"] is not None:
                found[phase] = max(found.get(phase, 0), peak["allocated"])
    for parts in (r["categories"] for r in ranks if on_host(r) and r["categories"]):
        found[parts["phase"]] = max(found.get(parts["phase"], 0), traced_total(parts))
    return found


def peak_of(ranks: Sequence[Rank]) -> int | None:
    """The fullest instant of a training step on any of the ranks' devices."""
    return max(step_peaks(ranks).values(), default=None)


def peak_bytes(row: Row) -> int | None:
    return peak_of(row.ranks)


def peak_phase(row: Row) -> str | None:
    """The first phase, in the order of the raw files, that reaches the peak."""
    peaks = step_peaks(row.ranks)
    return next((name for name, size in peaks.items() if size == peak_bytes(row)), None)


def need_bytes(row: Row) -> int | None:
    """What a device must have free: on a GPU the largest of all counts of the whole run, without
    one the peak of a step."""
    if not row.group.gpu:
        return peak_bytes(row)
    counts = ("allocated", "reserved", "process")
    return max((s for c in counts for s in sizes(row.ranks, c)), default=None)


def highest(count: str) -> Callable[[Row], int | None]:
    return lambda row: max(sizes(row.ranks, count), default=None)


def resident_bytes(row: Row) -> int | None:
    """The highest mark of a process above its baseline, in any phase; not of a GPU."""
    return max(sizes([r for r in row.ranks if on_host(r)], "allocated"), default=None)


def kept_on_host(rank: Rank) -> dict[str, int] | None:
    """By category what a rank kept in host memory at the fullest instant of that: on a GPU by
    device, without one by the engine's placement."""
    if on_host(rank):
        return (rank["categories"] or {}).get("host")
    return rank.get("host_categories")


def hosted_of(ranks: Sequence[Rank]) -> int | None:
    kept = [parts for parts in map(kept_on_host, ranks) if parts]
    return max(map(traced_total, kept), default=None)


def hosted_bytes(row: Row) -> int | None:
    return hosted_of(row.ranks)


def placed_by(row: Row) -> str | None:
    """How the places of a CPU's tensors were known, in the words of the raw result."""
    parts = [r["categories"] for r in row.ranks if on_host(r) and r["categories"]]
    words = [p.get("placed_by", "") for p in parts]
    unknown = [word for word in words if word.startswith("unknown")]
    return None if not words else (unknown or words)[0] or "not told apart"


def metered(phase: str) -> Callable[[Row], int | None]:
    """What the meter counted in a phase: a GPU's live tensors, or the resident mark."""
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


def fullest(row: Row) -> Rank | None:
    """The rank with the highest peak of those that traced a step."""
    traced = [rank for rank in row.ranks if rank["categories"]]
    return max(traced, key=lambda rank: peak_of([rank]) or 0, default=None)


def category(name: str) -> Callable[[Row], int | None]:
    return lambda row: (fullest(row) or {}).get("categories", {}).get(name)


def other_models_bytes(row: Row) -> int | None:
    """Models beside the trained one. Results of before scripts could be measured name none."""
    rank = fullest(row)
    return rank and rank["categories"].get("resident", 0)


def traced_bytes(row: Row) -> int | None:
    rank = fullest(row)
    return rank and traced_total(rank["categories"])


def untraced_bytes(row: Row) -> int | None:
    """What the meter counted in the steps beyond the traced tensors of both places."""
    rank = fullest(row)
    counted = [s for n in (rank or {}).get("phases", {}) if n not in SET_UP
               for s in sizes([rank], "allocated", n)]  # fmt: skip
    if not counted:
        return None
    parts = rank["categories"]
    tensors = traced_total(parts)
    if on_host(rank) and parts.get("everywhere"):
        tensors = parts["everywhere"]
    return max(counted) - tensors

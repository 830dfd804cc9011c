"""Derived numbers, one small pure function each. Input in seconds and bytes, output in base units.

A number that is undefined for the data is None, never 0 or -1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from harness.phases import SETUP_PEAKS
from harness.report.figures.units import ALL_CATEGORIES, CATEGORIES
from harness.result import GpuSample, Rank, Result, is_unplaced
from harness.system import cards

NOISE_LIMIT = 0.2
"""(p90 - p10) / median of the step times, from which a row is noisy."""
REPEAT_LIMIT = 0.1
"""Relative difference of the repetitions' medians from which a row is noisy."""
PAUSE = 10
"""Multiple of the median from which a step counts as a network pause.

A link that was down for 8 s and came back shows in one step alone, and the row is ok.
"""
LONG_PAUSE = (3, 5.0)
"""A smaller multiple, for a step that is also this many seconds longer than the median."""
LEAST = 1e-12
"""Keeps a relative distance to zero finite."""
NO_FLOPS = "FLOPs are not counted in own scripts, nor for frozen, added, removed or sparse weights"
CLOCK_LIMIT = 0.05
"""Relative drop of a clock, from before the timed steps to after them, that counts."""


def step_seconds(result: Result) -> list[float]:
    """Return the seconds of each timed step, by its slowest rank, for which the others wait."""
    return [max(step) for step in zip(*(r.step_seconds for r in result.ranks), strict=False)]


def paused_steps(result: Result) -> int:
    """Return the timed steps of a multi-node row beyond ``PAUSE`` or ``LONG_PAUSE``."""
    steps = step_seconds(result)
    if result.spec.nodes == 1 or not steps:
        return 0
    median = quantile(steps, 0.5)
    times, seconds = LONG_PAUSE
    long = max(times * median, median + seconds)
    return sum(step > min(PAUSE * median, long) for step in steps)


def quantile(values: Iterable[float], q: float) -> float:
    """Return the ``q`` quantile (0 to 1), linear between neighbours as NumPy's default."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def is_noisy(steps: Sequence[float], runs: Sequence[Sequence[float]]) -> bool:
    """Return True if (p90 - p10) / median of all steps exceeds ``NOISE_LIMIT``, or the medians of
    the repetitions are over ``REPEAT_LIMIT`` apart.
    """
    spread = quantile(steps, 0.9) - quantile(steps, 0.1)
    medians = [quantile(run, 0.5) for run in runs if run]
    apart = (max(medians) - min(medians)) / min(medians)
    return spread / quantile(steps, 0.5) > NOISE_LIMIT or apart > REPEAT_LIMIT


def types(evidence: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the types of compute, parameters, master and moments, read by a precision strategy."""
    facts = (facts for facts in evidence.values() if isinstance(facts, dict))
    return next((found for found in facts if found.get("compute_dtype")), {})


def precision(evidence: dict[str, dict[str, Any]]) -> str | None:
    """Return the type of matrix products.

    "tf32" if float32 was rounded for them, "float8" if the blocks' own products ran in it.
    """
    facts = types(evidence)
    kind = facts.get("compute_dtype")
    if facts.get("float8_products"):
        return "float8"
    return "tf32" if kind == "float32" and facts.get("tf32") else kind


def mfu(
    flops_device: float | None, device: str, kind: str | None
) -> tuple[float | None, str | None]:
    """Return the model's FLOP/s as a share of one device's dense peak for ``kind``, and None; or
    None and why there is no MFU.
    """
    if not flops_device:
        return None, NO_FLOPS
    if kind is None:
        return None, "no precision strategy showed the type it computes in"
    if device.lower() in ("cpu", ""):
        return None, "no peak is stated for a CPU"
    # Float8 has a peak, but attention and many layers beside such products stay in 16 bits.
    if kind not in cards.COLUMNS or kind == cards.FLOAT8:
        return None, f"no peak is known for {kind}"
    gpu = cards.named(device)
    if gpu is None:
        return None, f"{device} is not in the table of peaks"
    peak = gpu.peaks[kind]
    return (flops_device / peak, None) if peak else (None, f"{device} has no {kind} unit")


def highest_by_phase(ranks: Iterable[Rank], count: str) -> dict[str, int]:
    """Return phase -> the highest bytes of ``count``, a field of ``result.Peak``, of all ranks."""
    highest_of: dict[str, int] = {}
    for rank in ranks:
        for phase, peak in rank.phases.items():
            size = getattr(peak, count)
            if size is not None:
                highest_of[phase] = max(highest_of.get(phase, 0), size)
    return highest_of


def highest(ranks: Iterable[Rank], count: str) -> int | None:
    """Return the highest bytes of ``count`` over all ranks and phases; None if not counted."""
    return max(highest_by_phase(ranks, count).values(), default=None)


def peak_of(ranks: Iterable[Rank]) -> int | None:
    """Return the peak in bytes of a row, or of some of its ranks; None without one.

    This function defines "peak" in every format: live tensors on the device, in the steps of a
    training. On a GPU the caching allocator counts them. Without one the trace of a step does, and
    an untraced row has no peak. docs/explanation/memory.md lists what else to change with it.
    """
    sizes: list[int | None] = []
    for rank in ranks:
        if not on_cpu(rank):
            steps = (peak for phase, peak in rank.phases.items() if phase not in SETUP_PEAKS)
            sizes += [peak.allocated for peak in steps]
        elif rank.categories is not None:
            sizes.append(rank.categories.total)
    return max((size for size in sizes if size is not None), default=None)


def on_cpu(rank: Rank) -> bool:
    """Return True if host memory replaced a device's."""
    return rank.device == "cpu"


def need_bytes(ranks: Sequence[Rank], meter: str) -> int | None:
    """Return the bytes a device must have free for this row to run; rows are compared by it.

    On a GPU it is the largest of allocated, reserved and the process (with context and
    libraries), set-up included: a cache that cannot be reserved fails as an allocation does.
    Without a GPU it is the peak, because a device's memory beyond tensors cannot be measured. It is
    None if the process was not counted, because other rows ran on its GPU.
    """
    if meter != "cuda":
        return peak_of(ranks)
    known = [highest(ranks, count) for count in ("allocated", "reserved", "process")]
    return None if known[-1] is None else max(size for size in known if size is not None)


def resident_bytes(ranks: Iterable[Rank]) -> int | None:
    """Return the highest resident bytes of a process above its baseline; None on a GPU.

    All phases count, with set-up and the libraries' heap.
    """
    return highest((r for r in ranks if on_cpu(r)), "allocated")


def hosted_bytes(ranks: Iterable[Rank]) -> int | None:
    """Return the bytes that the fullest rank kept in host memory; None if none or unknown."""
    held = (r.categories and r.categories.host if on_cpu(r) else r.host_categories for r in ranks)
    return max((categories.total for categories in held if categories), default=None)


def placed_by(ranks: Iterable[Rank]) -> str | None:
    """Return the source of the placement of a CPU's tensors; None on GPUs, or without a trace."""
    words = [r.categories.placed_by for r in ranks if on_cpu(r) and r.categories is not None]
    unknown = [w for w in words if is_unplaced(w)]
    return next(iter(unknown or words), None)


def split(ranks: Sequence[Rank]) -> dict[str, int | None]:
    """Return the bytes of each category at the traced peak of a step, on the fullest rank.

    ``untraced`` is what that rank's meter counted in its steps beyond all traced tensors. It is
    negative if the meter saw less than the trace, for example if an allocation was never written.
    """
    traced = [rank for rank in ranks if rank.categories is not None]
    if not traced:
        return dict.fromkeys((*ALL_CATEGORIES, "untraced"))
    fullest = max(traced, key=lambda rank: peak_of([rank]) or 0)
    held = fullest.categories
    found: dict[str, int | None] = {name: getattr(held, name) for name in CATEGORIES}
    found["other_models"] = held.resident
    steps = [peak.allocated for phase, peak in fullest.phases.items() if phase not in SETUP_PEAKS]
    total = (on_cpu(fullest) and held.everywhere) or held.total
    return found | {"untraced": max(steps) - total if steps else None}


def step_distances(curve: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return abs(a - b) / max(abs(b), 1e-12) of each step; infinite if one is no finite number."""
    return [
        abs(a - b) / max(abs(b), LEAST) if math.isfinite(a) and math.isfinite(b) else math.inf
        for a, b in zip(curve, reference, strict=False)
    ]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return indices of (memory, speed) points that no other matches in both and beats in one."""
    front: set[tuple[float, float]] = set()
    best = -math.inf
    for memory, speed in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if speed > best:
            front.add((memory, speed))
            best = speed
    return [i for i, point in enumerate(points) if tuple(point) in front]


def compromise(points: Sequence[tuple[float, float]]) -> int | None:
    """Return the index of the best trade of memory for speed; None if no saving pays.

    Relative to the fastest point: the share of memory saved minus the share of speed lost, if
    above 0.
    """
    memory, speed = max(points, key=lambda p: (p[1], -p[0]), default=(0, 0))
    if memory <= 0:
        return None
    margins = [(1 - m / memory) - (1 - s / speed) for m, s in points]
    best = max(range(len(points)), key=margins.__getitem__)
    return best if margins[best] > 0 else None


def overlap(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Return True if two (low, high) intervals share a value."""
    return a[0] <= b[1] and b[0] <= a[1]


def spilled(result: Result) -> list[str]:
    """Return a warning if an allocator holds more than its GPU has, as Windows allows; else empty.

    The rest is in host memory, so steps take several times longer. Ranks with unlike GPUs are not
    judged, because a result has the memory of one of them.
    """
    held, card = highest(result.ranks, "reserved"), result.environment.get("device_bytes")
    if not held or not card or held <= card or len({rank.device for rank in result.ranks}) > 1:
        return []
    sizes = f"{held / 2**30:.1f} GiB on a GPU of {card / 2**30:.1f} GiB"
    return [f"PyTorch held {sizes}, partly in host memory: its times are not the GPU's"]


def hindered(samples: Sequence[GpuSample]) -> list[str]:
    """Return the disturbances of a run's GPUs, a few words each; empty if none is known.

    A clock that is equally low before and after is the card's, or set by its owner.
    """
    names = sorted({(s.index, reason) for s in samples for reason in s.held_back_by})
    words = [f"GPU {index} held back by {reason}" for index, reason in names]
    indices = sorted({s.index for s in samples})
    for index in indices:  # the run has one process on each GPU
        most = max(s.processes for s in samples if s.index == index)
        words += [f"GPU {index} shared by {most} processes"] if most > 1 else []
    clocks = {(s.index, s.when): s.sm_clock_hz for s in samples}
    for index in indices:
        before, after = (clocks.get((index, when), 0) for when in ("before", "after"))
        if before and after and after < before * (1 - CLOCK_LIMIT):
            words.append(f"GPU {index} clock {before / 1e6:.0f} -> {after / 1e6:.0f} MHz")
    return words

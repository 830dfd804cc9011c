"""Derived numbers of one row, which are columns of the CSV; and lines of a scaling series."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.phases import SETUP_PHASES
from harness.report.figures import derive, floor
from harness.report.figures.units import CATEGORIES
from harness.result import Rank, Result
from strategies import parse
from strategies.base import Slot


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The derived numbers of one row, in bytes, seconds, fractions (0.1 is 10 %) and ratios.

    None is a number that is undefined for the row. Each field is a column of the CSV, in this
    order. "Metered" is the meter's count: live tensors on a GPU, the resident mark without one.
    """

    repeats: int
    timed_steps: int
    step_seconds_median: float
    step_seconds_p10: float
    step_seconds_p90: float
    noise_fraction: float | None
    repeat_spread_fraction: float | None
    noisy: bool
    step_cpu_seconds_median: float | None
    step_minor_faults_median: float | None
    disturbed_steps: int | None
    samples_per_second: float
    flops_per_second: float | None
    flops_per_second_device: float | None
    precision: str | None
    mfu_fraction: float | None
    mfu_missing: str | None
    peak_bytes: int | None
    peak_phase: str | None
    need_bytes: int | None
    resident_peak_bytes: int | None
    hosted_bytes: int | None
    placed_by: str | None
    reserved_peak_bytes: int | None
    active_peak_bytes: int | None
    process_peak_bytes: int | None
    baseline_bytes: int
    imbalance_ratio: float | None
    host_peak_bytes: int
    host_total_bytes: int | None
    pinned_bytes: int
    nvme_bytes: int
    load_metered_bytes: int | None
    prepare_metered_bytes: int | None
    first_step_metered_bytes: int | None
    forward_metered_bytes: int | None
    backward_metered_bytes: int | None
    optimizer_metered_bytes: int | None
    steady_metered_bytes: int | None
    parameters_bytes: int | None
    gradients_bytes: int | None
    optimizer_state_bytes: int | None
    ema_bytes: int | None
    activations_bytes: int | None
    workspace_bytes: int | None
    other_models_bytes: int | None
    beyond_state_bytes: int | None
    untraced_bytes: int | None
    setup_seconds: float
    warmup_seconds: float
    wall_seconds: float | None


def numbers(results: list[Result]) -> Numbers:
    """Return the derived numbers of the repetitions of one spec."""
    first, ranks = results[0], [rank for result in results for rank in result.ranks]
    return Numbers(**_time(results, first), **_memory(results, ranks), **_categories(ranks))


def _time(results: list[Result], first: Result) -> dict[str, Any]:
    runs = [derive.step_seconds(result) for result in results]
    steps = [seconds for run in runs for seconds in run]
    median, step_noise = derive.quantile(steps, 0.5), derive.noise(steps)
    spread = derive.repeat_spread(runs)
    flops = derive.flops_per_second(first.flops_per_step, median)
    flops_device = flops / (first.spec.world or len(first.ranks)) if flops else None
    kind = derive.precision(first.evidence)
    device = str(first.environment.get("device") or first.spec.device)
    setup = [sum(r.phase_seconds.get(phase, 0.0) for phase in SETUP_PHASES) for r in first.ranks]
    return {
        "repeats": len(results),
        "timed_steps": len(steps),
        "step_seconds_median": median,
        "step_seconds_p10": derive.quantile(steps, 0.1),
        "step_seconds_p90": derive.quantile(steps, 0.9),
        "noise_fraction": step_noise,
        "repeat_spread_fraction": spread,
        "noisy": derive.is_noisy(step_noise, spread),
        **_usage(results),
        "samples_per_second": derive.samples_per_second(first.spec.global_batch, median),
        "flops_per_second": flops,
        "flops_per_second_device": flops_device,
        "precision": kind,
        "mfu_fraction": derive.mfu(flops_device, device, kind),
        "mfu_missing": derive.mfu_missing(flops_device, device, kind),
        "setup_seconds": max(setup),
        "warmup_seconds": max(sum(r.warmup_seconds) for r in first.ranks),
        "wall_seconds": first.launch.wall_seconds if first.launch else None,
    }


def _usage(results: list[Result]) -> dict[str, Any]:
    """Return the kernel's counts; None if a repetition is older than these counts."""
    marked = [floor.disturbed(result) for result in results]
    cpu = [seconds for result in results for seconds in floor.cpu_seconds(result)]
    faults = [pages for result in results for pages in floor.minor_faults(result)]
    return {
        "step_cpu_seconds_median": derive.quantile(cpu, 0.5) if cpu else None,
        "step_minor_faults_median": derive.quantile(faults, 0.5) if faults else None,
        "disturbed_steps": None if None in marked else sum(map(sum, marked)),
    }


def _memory(results: list[Result], ranks: list[Rank]) -> dict[str, Any]:
    peaks, metered = derive.peak_by_phase(ranks), derive.highest_by_phase(ranks, "allocated")
    trees = [r.launch.tree_peak_bytes for r in results if r.launch and r.launch.tree_peak_bytes]
    skews = [s for s in (derive.imbalance(result.ranks) for result in results) if s is not None]
    return {
        "peak_bytes": derive.peak_of(ranks),
        "peak_phase": max(peaks, key=peaks.__getitem__, default=None),
        "need_bytes": derive.need_bytes(ranks, results[0].meter),
        "resident_peak_bytes": derive.resident_bytes(ranks),
        "hosted_bytes": derive.hosted_bytes(ranks),
        "placed_by": derive.placed_by(ranks),
        "reserved_peak_bytes": derive.highest(ranks, "reserved"),
        "active_peak_bytes": derive.highest(ranks, "active"),
        "process_peak_bytes": derive.highest(ranks, "process"),
        "baseline_bytes": max(rank.baseline_bytes for rank in ranks),
        "imbalance_ratio": max(skews, default=None),
        "host_peak_bytes": max(rank.host_peak_bytes for rank in ranks),
        "host_total_bytes": max(trees, default=None),
        "pinned_bytes": max(rank.pinned_bytes for rank in ranks),
        "nvme_bytes": max(sum(rank.nvme_bytes for rank in r.ranks) for r in results),
        **{f"{phase}_metered_bytes": metered.get(phase) for phase in derive.PHASES},
    }


def _categories(ranks: list[Rank]) -> dict[str, Any]:
    """Return the fullest rank's categories at the traced peak of a step, and its untraced bytes."""
    names = (*CATEGORIES, "beyond_state")
    rank = derive.fullest_rank(ranks)
    if rank is None:
        return {f"{name}_bytes": None for name in (*names, "other_models", "untraced")}
    sizes = {f"{name}_bytes": getattr(rank.categories, name) for name in names}
    sizes["other_models_bytes"] = rank.categories.resident
    return {**sizes, "untraced_bytes": derive.untraced_bytes(rank)}


# ---- scaling ----
# Throughput by number of processes. Weak scaling fixes the samples of a process, strong scaling
# those of a step.


REGIMES = ("weak", "strong")
TOGETHER = (Slot.SEQUENCE, Slot.TENSOR)
"""Slots of strategies that need several ranks."""
RINGS = {
    "allreduce": lambda size, ranks: 2 * size * (ranks - 1) // ranks,
    "reduce_scatter": lambda size, ranks: size * (ranks - 1) // ranks,
    "reduce_scatter_base": lambda size, ranks: size * (ranks - 1) // ranks,
    "alltoall_base": lambda size, ranks: size * (ranks - 1) // ranks,
    "allgather": lambda size, ranks: size * (ranks - 1),
    "allgather_base": lambda size, ranks: size * (ranks - 1),
}
"""Collective -> bytes that a rank sends in a ring, as a function of the bytes it passes in."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One row: ``recipe`` as requested, on ``count`` processes, with ``batch`` samples a step.

    ``seconds``: of one step. ``ends``: the same at both ends of its uncertainty (empty if
    unknown). ``row``: the source of the point.
    """

    recipe: str
    count: int
    batch: int
    seconds: float | None
    ends: tuple[float, ...] = ()
    row: Any = None

    @property
    def rate(self) -> float | None:
        """Samples per second of all processes."""
        return self.batch / self.seconds if self.seconds else None


@dataclass(frozen=True, kw_only=True)
class Line:
    """The points of one recipe in one regime, by their number of processes.

    ``base`` is the point of comparison (``base_of``), or None.
    """

    recipe: str
    points: tuple[Point, ...]
    base: Point | None


def plain(recipe: str) -> str:
    """Return the same training on one process: no sharding and no multi-rank strategies."""
    parts = parse(recipe)
    gone = {part.name for slot in TOGETHER if (part := parts.in_slot(slot))}
    words = [word for word in recipe.split("+") if word.partition(":")[0] not in gone]
    return "+".join("single" if w.partition(":")[0] == parts.sharding.name else w for w in words)


def lines(points: Iterable[Point], regime: str) -> list[Line]:
    """Return the lines of a regime, in the order of the points.

    Plain training on one process starts each of its recipe's lines; it is no line by itself.
    """
    every = list(points)
    alone = {(p.recipe, p.batch): p for p in every if p.count == 1 and p.recipe == plain(p.recipe)}
    found: dict[tuple[str, int], list[Point]] = {}
    for point in every:
        if point not in alone.values():
            found.setdefault((point.recipe, _kept(point, regime)), []).append(point)
    made = (_line(of, alone.get((plain(name), kept))) for (name, kept), of in found.items())
    return [line for line in made if line]


def _kept(point: Point, regime: str) -> int:
    """Return the samples that a regime fixes; negative, unlike any other, if no integer."""
    if regime == "strong":
        return point.batch
    return point.batch // point.count if point.batch % point.count == 0 else -point.count


def _line(points: Sequence[Point], alone: Point | None) -> Line | None:
    ordered = sorted(points, key=lambda p: p.count)
    counts = {p.count for p in ordered} | ({1} if alone else set())
    if len(counts) < 2:
        return None
    return Line(recipe=ordered[0].recipe, points=tuple(ordered), base=base_of(ordered, alone))


def base_of(points: Sequence[Point], alone: Point | None) -> Point | None:
    """Return the base of efficiency: plain training on one process, which has no communication.

    If that has no time, it is the recipe's own smallest number of processes with a time.
    """
    return next((p for p in (alone, *points) if p and p.seconds), None)


def efficiency(
    point: Point, base: Point, shared: bool = False
) -> tuple[float, float, float] | None:
    """Return samples per second of a process relative to ``base``: (least, best estimate, most).

    The range needs ends on both sides. ``shared``: over all processes, if they share the same
    cores.
    """
    if not (point.seconds and base.seconds):
        return None
    work = point.batch / base.batch * (1 if shared else base.count / point.count)
    ends = zip(base.ends, point.ends, strict=True) if base.ends and point.ends else ()
    found = [work * base.seconds / point.seconds, *(work * b / p for b, p in ends)]
    return min(found), found[0], max(found)


def told_once(found: Iterable[Line]) -> list[tuple[Line, Point]]:
    """Return the points of all lines, each with its line; a base of several appears once."""
    pairs: list[tuple[Line, Point]] = []
    told: list[Point] = []
    for line in found:
        if line.base and line.base not in (*line.points, *told):
            told.append(line.base)
            pairs.append((line, line.base))
        pairs += [(line, point) for point in line.points]
    return pairs


def ring_bytes(sent: Mapping[str, Mapping[str, int]], ranks: int) -> int | None:
    """Return the bytes that a rank sends in a step by collectives among all ``ranks``.

    ``sent`` is the fact ``sent_bytes`` of a sharding: phase -> "collective type" -> bytes. None
    if the rule of a collective is unknown.
    """
    total = 0
    for of_phase in sent.values():
        for name, size in of_phase.items():
            rule = RINGS.get(name.partition(" ")[0])
            if rule is None:
                return None
            total += rule(size, ranks)
    return total

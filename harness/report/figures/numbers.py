"""Derived numbers of one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.phases import SETUP_PHASES
from harness.report.figures import derive, floor
from harness.report.figures.units import ALL_CATEGORIES, CATEGORIES
from harness.result import Rank, Result


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The derived numbers of one row, in bytes, seconds, fractions (0.1 is 10 %) and ratios.

    None is a number that is undefined for the row. "Metered" is the meter's count: live tensors on
    a GPU, the resident mark without one.
    """

    repeats: int
    timed_steps: int
    step_seconds_median: float
    step_seconds_p10: float
    step_seconds_p90: float
    noisy: bool
    disturbed_steps: int | None
    samples_per_second: float
    flops_per_second: float | None
    flops_per_second_device: float | None
    precision: str | None
    mfu_fraction: float | None
    mfu_missing: str | None
    peak_bytes: int | None
    need_bytes: int | None
    resident_peak_bytes: int | None
    hosted_bytes: int | None
    placed_by: str | None
    reserved_peak_bytes: int | None
    host_total_bytes: int | None
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
    marked = [floor.disturbed(result) for result in results]
    steps = [seconds for run in runs for seconds in run]
    median, step_noise = derive.quantile(steps, 0.5), derive.noise(steps)
    spread = derive.repeat_spread(runs)
    flops = derive.flops_per_second(first.flops_per_step, median)
    flops_device = flops / len(first.ranks) if flops else None
    kind = derive.precision(first.evidence)
    device = str(first.environment.get("device") or first.spec.device)
    setup = [sum(r.phase_seconds.get(phase, 0.0) for phase in SETUP_PHASES) for r in first.ranks]
    return {
        "repeats": len(results),
        "timed_steps": len(steps),
        "step_seconds_median": median,
        "step_seconds_p10": derive.quantile(steps, 0.1),
        "step_seconds_p90": derive.quantile(steps, 0.9),
        "noisy": derive.is_noisy(step_noise, spread),
        "disturbed_steps": None if None in marked else sum(map(sum, marked)),
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


def _memory(results: list[Result], ranks: list[Rank]) -> dict[str, Any]:
    metered = derive.highest_by_phase(ranks, "allocated")
    trees = [r.launch.tree_peak_bytes for r in results if r.launch and r.launch.tree_peak_bytes]
    return {
        "peak_bytes": derive.peak_of(ranks),
        "need_bytes": derive.need_bytes(ranks, results[0].meter),
        "resident_peak_bytes": derive.resident_bytes(ranks),
        "hosted_bytes": derive.hosted_bytes(ranks),
        "placed_by": derive.placed_by(ranks),
        "reserved_peak_bytes": derive.highest(ranks, "reserved"),
        "host_total_bytes": max(trees, default=None),
        "nvme_bytes": max(sum(rank.nvme_bytes for rank in r.ranks) for r in results),
        **{f"{phase}_metered_bytes": metered.get(phase) for phase in derive.PHASES},
    }


def _categories(ranks: list[Rank]) -> dict[str, Any]:
    """Return the fullest rank's categories at the traced peak of a step, and its untraced bytes."""
    rank = derive.fullest_rank(ranks)
    if rank is None:
        return {f"{name}_bytes": None for name in (*ALL_CATEGORIES, "untraced")}
    sizes = {f"{name}_bytes": getattr(rank.categories, name) for name in CATEGORIES}
    sizes["other_models_bytes"] = rank.categories.resident
    return {**sizes, "untraced_bytes": derive.untraced_bytes(rank)}

"""Derived numbers of one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.phases import SETUP_PHASES
from harness.report.figures import derive, floor
from harness.result import Result


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The derived numbers of one row, in bytes, seconds, fractions (0.1 is 10 %) and ratios.

    None is a number that is undefined for the row. ``phase_bytes``: phase -> the meter's count,
    which is live tensors on a GPU and the resident mark without one.
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
    phase_bytes: dict[str, int]
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


def numbers(results: Sequence[Result]) -> Numbers:
    """Return the derived numbers of the repetitions of one spec."""
    first, ranks = results[0], [rank for result in results for rank in result.ranks]
    runs = [derive.step_seconds(result) for result in results]
    marked = [floor.disturbed(result) for result in results]
    steps = [seconds for run in runs for seconds in run]
    median = derive.quantile(steps, 0.5)
    flops = first.flops_per_step / median if first.flops_per_step > 0 else None
    flops_device = flops / len(first.ranks) if flops else None
    kind = derive.precision(first.evidence)
    device = str(first.environment.get("device") or first.spec.device)
    mfu_fraction, mfu_missing = derive.mfu(flops_device, device, kind)
    setup = [sum(r.phase_seconds.get(phase, 0.0) for phase in SETUP_PHASES) for r in first.ranks]
    trees = [r.launch.tree_peak_bytes for r in results if r.launch and r.launch.tree_peak_bytes]
    sizes = {f"{name}_bytes": size for name, size in derive.split(ranks).items()}
    return Numbers(
        repeats=len(results),
        timed_steps=len(steps),
        step_seconds_median=median,
        step_seconds_p10=derive.quantile(steps, 0.1),
        step_seconds_p90=derive.quantile(steps, 0.9),
        noisy=derive.is_noisy(steps, runs),
        disturbed_steps=None if None in marked else sum(map(sum, marked)),
        samples_per_second=first.spec.global_batch / median,
        flops_per_second=flops,
        flops_per_second_device=flops_device,
        precision=kind,
        mfu_fraction=mfu_fraction,
        mfu_missing=mfu_missing,
        peak_bytes=derive.peak_of(ranks),
        need_bytes=derive.need_bytes(ranks, first.meter),
        resident_peak_bytes=derive.resident_bytes(ranks),
        hosted_bytes=derive.hosted_bytes(ranks),
        placed_by=derive.placed_by(ranks),
        reserved_peak_bytes=derive.highest(ranks, "reserved"),
        host_total_bytes=max(trees, default=None),
        nvme_bytes=max(sum(rank.nvme_bytes for rank in r.ranks) for r in results),
        phase_bytes=derive.highest_by_phase(ranks, "allocated"),
        **sizes,
        setup_seconds=max(setup),
        warmup_seconds=max(sum(r.warmup_seconds) for r in first.ranks),
    )

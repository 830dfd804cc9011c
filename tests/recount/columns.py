"""What each column holds: of report.csv by its name, of a table by its title and the column's head.

To recount a new column, add it here, with a small function of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.recount import measures as m
from tests.recount import predicted as p
from tests.recount import versus as v
from tests.recount import words as w
from tests.recount.cells import Number, change, distance, gib, percent

__all__ = ["NUMBERS", "TABLES", "UNFINISHED", "VERSUS"]

Take = Callable[[Any], Any]


def _gib(take: Take) -> Take:
    return lambda row: gib(take(row))


def _number(take: Take, places: int, scale: float = 1.0) -> Take:
    def cell(row: Any) -> Number | None:
        value = take(row)
        return None if value is None else Number(scale * value, places)

    return cell


def _versus(take: Take) -> Take:
    """Of a row that is not the reference itself."""
    return lambda row: None if row.is_reference else take(row)


def _or_none(take: Take) -> Take:
    """A count that is left out where it is nothing."""
    return lambda row: take(row) or None


# ---- report.csv ----

NUMBERS: dict[str, Take] = {
    "repeats": lambda row: len(row.runs),
    "timed_steps": lambda row: len(m.steps(row)),
    "step_seconds_median": m.step_seconds_median,
    "step_seconds_p10": lambda row: m.tenth(m.steps(row), 1),
    "step_seconds_p90": lambda row: m.tenth(m.steps(row), 9),
    "noise_fraction": m.noise_fraction,
    "repeat_spread_fraction": m.repeat_spread_fraction,
    "noisy": m.noisy,
    "samples_per_second": m.samples_per_second,
    "flops_per_second": m.flops_per_second,
    "flops_per_second_device": m.flops_per_second_device,
    "precision": m.precision,
    "mfu_fraction": m.mfu_fraction,
    "peak_bytes": m.peak_bytes,
    "peak_phase": m.peak_phase,
    "need_bytes": m.need_bytes,
    "reserved_peak_bytes": m.highest("reserved"),
    "active_peak_bytes": m.highest("active"),
    "process_peak_bytes": m.highest("process"),
    "baseline_bytes": m.highest_of_ranks("baseline_bytes"),
    "imbalance_ratio": m.imbalance_ratio,
    "host_peak_bytes": m.highest_of_ranks("host_peak_bytes"),
    "host_total_bytes": m.host_total_bytes,
    "pinned_bytes": m.highest_of_ranks("pinned_bytes"),
    "nvme_bytes": m.nvme_bytes,
    **{f"{phase}_peak_bytes": m.phase_peak(phase) for phase in m.PHASES},
    **{f"{name}_bytes": m.category(name) for name in (*m.CATEGORIES, "beyond_state")},
    "untraced_bytes": m.untraced_bytes,
    "untraced_raw_bytes": m.untraced_raw_bytes,
    "setup_seconds": m.setup_seconds,
    "warmup_seconds": m.warmup_seconds,
    "wall_seconds": m.wall_seconds,
}
"""Column of report.csv -> its value, of a row alone."""
VERSUS: dict[str, Take] = {
    "rank": lambda row: 1 + v.ranked(row.group).index(row),
    "front": v.front,
    "is_reference": lambda row: row.is_reference,
    "speed_ratio": v.speed_ratio,
    "peak_change_fraction": v.peak_change_fraction,
    "loss_distance": v.loss_distance,
    "grad_norm_distance": v.grad_norm_distance,
    "parity": v.parity,
}
"""Column of report.csv -> its value, against the reference row."""

# ---- the tables ----

RECIPE = {"Recipe": lambda row: row.label}
SPEED = {
    "Samples/s": _number(m.samples_per_second, 1),
    "x ref": _versus(_number(v.speed_ratio, 2)),
    "Step ms": _number(m.step_seconds_median, 0, 1e3),
    "p10 to p90 ms": w.p10_to_p90,
}
PEAK = {
    "Peak GiB": _gib(m.peak_bytes),
    "vs ref %": _versus(lambda row: change(v.peak_change_fraction(row))),
    "Active GiB": _gib(NUMBERS["active_peak_bytes"]),
    "Reserved GiB": _gib(NUMBERS["reserved_peak_bytes"]),
    "Process GiB": _gib(NUMBERS["process_peak_bytes"]),
    "Host GiB": _gib(m.host_total_bytes),
}
RANKING = {
    "#": _number(VERSUS["rank"], 0),
    **RECIPE,
    "Processes": _number(lambda row: row.spec["processes"], 0),
    **SPEED,
    **PEAK,
    "MFU %": lambda row: percent(m.mfu_fraction(row)),
    "Loss vs ref": w.loss,
    "Notes": w.notes,
}
TABLES: dict[str, dict[str, Take]] = {
    "Ranking": RANKING,
    "Peak of each phase": {
        **RECIPE,
        **{f"{w.title(n)} GiB": _gib(m.phase_peak(n)) for n in m.PHASES},
        "Peak in": w.phase,
    },
    "What the peak is made of": {
        **RECIPE,
        **{f"{w.title(name)} GiB": _gib(m.category(name)) for name in m.CATEGORIES},
        "Untraced GiB": _gib(m.untraced_bytes),
    },
    "What the host holds": {
        **RECIPE,
        **{f"{w.title(name)} GiB": w.host(name) for name in m.CATEGORIES},
    },
    "Memory, all counts": {
        **RECIPE,
        **PEAK,
        "Baseline GiB": _gib(NUMBERS["baseline_bytes"]),
        "Ranks max/min": _number(m.imbalance_ratio, 2),
        "Host, a rank GiB": _gib(NUMBERS["host_peak_bytes"]),
        "Host, all GiB": _gib(m.host_total_bytes),
        "Pinned GiB": _gib(_or_none(NUMBERS["pinned_bytes"])),
        "NVMe GiB": _gib(_or_none(m.nvme_bytes)),
    },
    "Precision": {
        **RECIPE,
        "Products": m.precision,
        "Weights in the model": lambda row: m.types(row).get("parameters") or None,
        "Weights that are updated": lambda row: m.types(row).get("master") or None,
        "Moments": lambda row: m.types(row).get("moments") or None,
    },
    "Predicted and measured": {
        **RECIPE,
        "By": lambda row: p.prediction(row)["method"],
        "Step, predicted GiB": _gib(p.step_predicted),
        "Step, traced GiB": _gib(p.step_traced),
        "Step error %": lambda row: change(p.step_error(row), 2),
        "Worst category": lambda row: p.worst(row) and p.worst(row).title,
        "Its error %": lambda row: p.worst(row) and change(p.worst(row).error, 2),
        "Run, predicted GiB": _gib(p.run_predicted),
        "Run, measured GiB": _gib(p.run_measured),
        "Run error %": lambda row: change(p.run_error(row), 2),
        "Why no trace": lambda row: p.prediction(row)["reason"] or None,
    },
    "Predicted and traced, by category": {
        "Recipe": lambda part: part.row.label,
        "Category": lambda part: part.title,
        "Predicted GiB": lambda part: gib(part.predicted),
        "Traced GiB": lambda part: gib(part.traced),
        "Error %": lambda part: change(part.error, 2),
    },
    "Time": {
        **RECIPE,
        **SPEED,
        "p10 ms": _number(NUMBERS["step_seconds_p10"], 0, 1e3),
        "p90 ms": _number(NUMBERS["step_seconds_p90"], 0, 1e3),
        "Spread %": lambda row: percent(m.noise_fraction(row)),
        "Steps": _number(lambda row: len(m.steps(row)), 0),
        "Repeats": _number(lambda row: len(row.runs), 0),
        "Between repeats %": lambda row: percent(m.repeat_spread_fraction(row)),
        "TFLOP/s a device": _number(m.flops_per_second_device, 1, 1e-12),
        "Set-up s": _number(m.setup_seconds, 1),
        "Warm-up s": _number(m.warmup_seconds, 1),
        "Compile s": _number(w.compiled("compile_seconds"), 1),
        "Graph breaks": _number(w.compiled("graph_breaks"), 0),
        "Whole run s": _number(m.wall_seconds, 1),
    },
    "Same computation?": {
        **RECIPE,
        "Promised": lambda row: row.first["parity"],
        "Loss distance": _versus(lambda row: distance(v.loss_distance(row))),
        "Gradient norm distance": _versus(lambda row: distance(v.grad_norm_distance(row))),
        "Verdict": v.parity,
        "First loss": _number(lambda row: row.first["losses"][0], 4),
        "Last loss": _number(lambda row: row.first["losses"][-1], 4),
    },
    "DeepSpeed buckets": {
        **RECIPE,
        "Stage": lambda row: str(w.zero_block(row)["stage"]),
        **{
            name: w.bucket(name)
            for name in (
                *("reduce_bucket_size", "allgather_bucket_size", "sub_group_size"),
                *("stage3_prefetch_bucket_size", "stage3_max_live_parameters"),
                "stage3_param_persistence_threshold",
            )
        },
    },
    "What each part does": {
        "Adding": lambda pair: pair.part,
        "to": lambda pair: pair.base.label,
        "Samples/s x": lambda pair: Number(pair.speed, 2),
        "Peak %": lambda pair: change(pair.peak),
    },
}
"""Title of a table -> head of a column -> what it says of a line's subject."""
UNFINISHED: dict[str, Take] = {
    "Recipe": lambda run: run.spec["recipe"],
    "Status": lambda run: run.status,
    "In": w.ended,
    "Peak so far GiB": _gib(lambda run: run.data["peak_so_far_bytes"] or m.peak_of(run.ranks)),
    "Why": w.why,
    "Way out": lambda run: run.data["way_out"],
}
"""The table of what did not finish."""

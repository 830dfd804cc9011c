"""What each column holds: of report.csv by its name, of a table by its title and the column's head.

To recount a new column, add it here, with a small function of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.recount import drawn, effects, noise, same
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


def _ratio(value: float | str) -> Number | str:
    return value if isinstance(value, str) else Number(value, 2)


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
    "step_cpu_seconds_median": m.usage_median("cpu_seconds"),
    "step_minor_faults_median": m.usage_median("minor_faults"),
    "disturbed_steps": m.disturbed_steps,
    "samples_per_second": m.samples_per_second,
    "flops_per_second": m.flops_per_second,
    "flops_per_second_device": m.flops_per_second_device,
    "precision": m.precision,
    "mfu_fraction": m.mfu_fraction,
    "peak_bytes": m.peak_bytes,
    "peak_phase": m.peak_phase,
    "need_bytes": m.need_bytes,
    "resident_peak_bytes": m.resident_bytes,
    "hosted_bytes": m.hosted_bytes,
    "placed_by": m.placed_by,
    "reserved_peak_bytes": m.highest("reserved"),
    "active_peak_bytes": m.highest("active"),
    "process_peak_bytes": m.highest("process"),
    "baseline_bytes": m.highest_of_ranks("baseline_bytes"),
    "imbalance_ratio": m.imbalance_ratio,
    "host_peak_bytes": m.highest_of_ranks("host_peak_bytes"),
    "host_total_bytes": m.host_total_bytes,
    "pinned_bytes": m.highest_of_ranks("pinned_bytes"),
    "nvme_bytes": m.nvme_bytes,
    **{f"{phase}_metered_bytes": m.metered(phase) for phase in m.PHASES},
    **{f"{name}_bytes": m.category(name) for name in (*m.CATEGORIES, "beyond_state")},
    "untraced_bytes": m.untraced_bytes,
    "setup_seconds": m.setup_seconds,
    "warmup_seconds": m.warmup_seconds,
    "wall_seconds": m.wall_seconds,
}
"""Column of report.csv -> its value, of a row alone."""
VERSUS: dict[str, Take] = {
    "place": v.place,
    "rank": v.rank,
    "front": v.front,
    "is_reference": lambda row: row.is_reference,
    "speed_ratio": v.speed_ratio,
    "speed_differs": v.of_reference(noise.differ),
    "speed_margin_fraction": v.of_reference(noise.margin_fraction),
    "need_change_fraction": v.need_change_fraction,
    "loss_distance": v.loss_distance,
    "grad_norm_distance": v.distance("norm"),
    **{f"{kind}_distance": v.distance(kind) for kind in ("moment", "update", "average")},
    "parity": v.parity,
    "differs_in": v.differs_in,
    "sibling": v.sibling_name,
    "sibling_loss_distance": v.sibling_distance("loss"),
    "sibling_norm_distance": v.sibling_distance("norm"),
}
"""Column of report.csv -> its value, against the reference row."""

# ---- the tables ----

RECIPE = {"Recipe": lambda row: row.label}
STEP = {"Step ms": _number(m.step_seconds_median, 0, 1e3)}
PEAK = {
    "Peak GiB": _gib(m.peak_bytes),
    "Needs GiB": lambda row: gib(m.need_bytes(row)) if row.group.gpu else None,
}
AWAY = {"vs ref %": _versus(lambda row: change(v.need_change_fraction(row)))}
PLACES = {"On host GiB": _gib(m.hosted_bytes), "Resident GiB": _gib(m.resident_bytes)}
RESERVED = {"Reserved GiB": _gib(NUMBERS["reserved_peak_bytes"])}
HOST = {"Host GiB": _gib(m.host_total_bytes)}
LATENCY = {"Latency of one ms": _number(drawn.DRAWN["latency_seconds_median"], 0, 1e3)}
PSNR = {"PSNR dB": w.psnr}
RANKING = {
    "#": _number(v.rank, 0),
    **RECIPE,
    "Processes": lambda row: Number(row.spec["processes"]) if w.on_several(row) else None,
    "Samples/s": _number(m.samples_per_second, 1),
    "x ref": v.of_reference(lambda row, base: _ratio(v.ratio_cell(row, base))),
    **STEP,
    "p10 to p90 ms": w.p10_to_p90,
    **LATENCY,
    **PEAK,
    **AWAY,
    **PLACES,
    **HOST,
    "MFU %": lambda row: percent(m.mfu_fraction(row)),
    "Loss vs ref": w.loss,
    "Samples vs ref": lambda row: drawn.same_samples(row, v.parity(row)),
    **PSNR,
    "Notes": w.notes,
}
SIMULATED = {
    "#": RANKING["#"],
    **RECIPE,
    **PEAK,
    **AWAY,
    **PLACES,
    **RESERVED,
    **HOST,
    "Step ms, no communication": STEP["Step ms"],
    "Notes": lambda row: "simulated",
}


def _of_workload(draws: bool, take: Take) -> Take:
    return lambda row: take(row) if drawn.draws(row.group) is draws else None


DRAWN_PHASES = {"Warm-up GiB": "first_step", "Denoise GiB": "steady"}
"""What the phases of a batch are called, where they have a name of their own."""
OF_EACH_PHASE = {
    **RECIPE,
    **{
        f"{w.title(n)} GiB": _of_workload(False, _gib(m.metered(n)))
        if n in DRAWN_PHASES.values()
        else _gib(m.metered(n))
        for n in m.PHASES
    },
    **{head: _of_workload(True, _gib(m.metered(n))) for head, n in DRAWN_PHASES.items()},
    "Peak in": lambda row: w.phase(row) if row.group.gpu else None,
}
TABLES: dict[str, dict[str, Take]] = {
    "Ranking": RANKING,
    "Simulated": SIMULATED,
    "Live tensors of each phase": OF_EACH_PHASE,
    "Resident mark of each phase": OF_EACH_PHASE,
    "What the peak is made of": {
        **RECIPE,
        "Traced peak GiB": _gib(m.traced_bytes),
        "Peak in": lambda row: None if row.group.gpu else w.phase(row),
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
        **PLACES,
        "Active GiB": _gib(NUMBERS["active_peak_bytes"]),
        **RESERVED,
        "Process GiB": _gib(NUMBERS["process_peak_bytes"]),
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
        "Host, predicted GiB": _gib(p.hosted_predicted),
        "Host, traced GiB": _gib(p.hosted_measured),
        "Host error %": lambda row: change(p.hosted_error(row), 2),
        "Run, predicted GiB": _gib(p.run_predicted),
        "Run, measured GiB": _gib(p.run_measured),
        "Run error %": lambda row: change(p.run_error(row), 2),
        "Reserved, predicted GiB": _gib(p.reserved_predicted),
        "Reserved, measured GiB": _gib(p.reserved_measured),
        "Reserved error %": lambda row: change(p.reserved_error(row), 2),
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
        **STEP,
        "p10 ms": _number(NUMBERS["step_seconds_p10"], 0, 1e3),
        "p90 ms": _number(NUMBERS["step_seconds_p90"], 0, 1e3),
        "Spread %": lambda row: percent(m.noise_fraction(row)),
        "Steps": _number(lambda row: len(m.steps(row)), 0),
        "Disturbed": w.disturbed,
        "CPU s a step": _number(m.usage_median("cpu_seconds"), 1),
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
        "Gradient norm distance": _versus(lambda row: distance(v.distance("norm")(row))),
        "Moment distance": _versus(lambda row: distance(v.distance("moment")(row))),
        "Update distance": _versus(lambda row: distance(v.distance("update")(row))),
        "Average distance": _versus(lambda row: distance(v.distance("average")(row))),
        "Verdict": v.parity,
        "Differs in": v.differs_in,
        "First loss": _number(lambda row: row.first["losses"][0], 4),
        "Last loss": _number(lambda row: row.first["losses"][-1], 4),
    },
    "Same samples?": {
        **RECIPE,
        "Promised": lambda row: row.first["parity"],
        "Relative L2": lambda row: distance(drawn.DRAWN["samples_distance"](row)),
        "Worst sample": lambda row: distance(drawn.DRAWN["samples_distance_worst"](row)),
        **PSNR,
        "Recognised %": lambda row: percent(drawn.share(row)),
        "Taken as reference's %": lambda row: percent(drawn.share(row, "taken_for")),
        "Equal up to": lambda row: distance(drawn.DRAWN["samples_equal_up_to"](row)),
        "Echo of a last bit": lambda row: distance(drawn.drawing(row)["echo"]),
        "Evaluations": lambda row: Number(drawn.drawing(row)["evaluations"]),
        "Verdict": v.parity,
        "Differs in": v.differs_in,
    },
    "Rows that alter the same": {
        **RECIPE,
        "Alters by design": lambda row: same.design(row.runs[0]),
        "Computation": lambda row: same.computation(row) or None,
        "Sibling": v.sibling_name,
        "Loss distance": lambda row: distance(v.sibling_distance("loss")(row)),
        "Gradient norm distance": lambda row: distance(v.sibling_distance("norm")(row)),
    },
    "DeepSpeed buckets": {
        **RECIPE,
        "Stage": lambda row: str(w.zero_block(row)["stage"]),
        "overlap_comm": w.overlap,
        "Second share among": w.second_share,
        "Offloaded %": lambda row: percent(w.offloaded(row)),
        **{
            name: w.bucket(name)
            for name in (
                *("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"),
                *("stage3_max_live_parameters", "stage3_param_persistence_threshold"),
                "sub_group_size",
            )
        },
    },
    "FSDP2 gathering": {
        **RECIPE,
        "Prefetch": lambda row: str(w.gathering(row)["prefetch"]),
        "Behind forward": w.behind_forward,
        "Whole at once": lambda row: Number(w.gathering(row)["most_groups_at_once"]),
        "Groups": lambda row: Number(w.gathering(row)["groups"]),
        "Ahead in forward": w.ahead("forward"),
        "Ahead in backward": w.ahead("backward"),
        "Gathered MiB in forward": w.gathered("forward"),
        "Gathered MiB in backward": w.gathered("backward"),
    },
    "What each part does": {
        "Adding": lambda pair: pair.words,
        "to": lambda pair: pair.base.label,
        "Samples/s x": lambda pair: _ratio(pair.speed),
        "Memory %": lambda pair: change(pair.need),
        "Why": effects.why,
    },
}
"""Title of a table -> head of a column -> what it says of a line's subject."""
UNFINISHED: dict[str, Take] = {
    "Recipe": w.named,
    "Status": lambda run: run.status,
    "In": w.ended,
    "So far GiB": _gib(w.so_far),
    "Predicted need GiB": _gib(w.predicted_need),
    "Memory GiB": lambda run: gib(p.host_memory(run)) if w.predicted_need(run) else None,
    "Predicted to fit": w.predicted_to_fit,
    "Why": w.why,
    "Way out": lambda run: run.data["way_out"],
}
"""The table of what did not finish."""

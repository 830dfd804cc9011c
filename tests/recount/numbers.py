"""The numbers of a report.json against the same numbers recounted from raw results.

A number that has no function here is a mismatch: add one to ``NUMBERS`` (of a row alone) or to
``VERSUS`` (against other rows).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from tests.recount import answers, noise, same
from tests.recount import measures as m
from tests.recount import predicted as p
from tests.recount import versus as v
from tests.recount.drawn import DRAWN
from tests.recount.raw import Group, ResultSet, Row, Run

Take = Callable[[Any], Any]
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
    "mfu_missing": lambda row: None if m.mfu_fraction(row) else str,
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
    "other_models_bytes": m.other_models_bytes,
    "untraced_bytes": m.untraced_bytes,
    "setup_seconds": m.setup_seconds,
    "warmup_seconds": m.warmup_seconds,
    "wall_seconds": m.wall_seconds,
}
"""Numbers of a row alone; ``str`` stands for any words: sentences are not recounted."""
VERSUS: dict[str, Take] = {
    "place": v.place,
    "rank": v.rank,
    "last_rank": v.last_rank,
    "front": v.front,
    "is_reference": lambda row: row.is_reference,
    "speed_ratio": v.speed_ratio,
    "speed_differs": v.of_reference(noise.differ),
    "speed_same": lambda row: not row.is_reference and noise.same(row, row.group.reference),
    "speed_margin_fraction": v.of_reference(noise.margin_fraction),
    "need_change_fraction": v.need_change_fraction,
    "loss_distance": v.loss_distance,
    "grad_norm_distance": v.distance("norm"),
    **{f"{kind}_distance": v.distance(kind) for kind in ("moment", "update", "average")},
    "parity": v.parity,
    "differs_in": lambda row: str if v.judged(row)[1] else None,
    "sibling": v.sibling_name,
    "sibling_loss_distance": v.sibling_distance("loss"),
    "sibling_norm_distance": v.sibling_distance("norm"),
}
"""Numbers of a row against other rows."""


def _needed(row: Row) -> int | None:
    return p.least(row.runs[0], row.runs[0].prediction)


PREDICTED: dict[str, Take] = {
    "predicted_by": lambda row: p.prediction(row)["method"],
    "predicted_step_bytes": p.step_predicted,
    "traced_step_bytes": p.step_traced,
    "predicted_step_error_fraction": p.step_error,
    "predicted_worst_category": lambda row: p.worst(row) and p.worst(row).name,
    "predicted_worst_category_error_fraction": lambda row: p.worst(row) and p.worst(row).error,
    "predicted_hosted_bytes": p.hosted_predicted,
    "predicted_hosted_error_fraction": p.hosted_error,
    "predicted_run_bytes": p.run_predicted,
    "predicted_run_error_fraction": p.run_error,
    "predicted_reserved_bytes": p.reserved_predicted,
    "predicted_reserved_error_fraction": p.reserved_error,
    "predicted_least_bytes": _needed,
    "available_bytes": lambda row: p.host_memory(row.runs[0]) if _needed(row) else None,
}
OF_A_ROW = {
    "numbers": NUMBERS,
    "versus_reference": VERSUS,
    "drawn": DRAWN,
    "predicted": PREDICTED,
}
"""Part of a row's entry -> its numbers."""
RAW: dict[str, Take] = {
    "label": lambda row: row.label,
    "step_seconds": lambda row: [run.steps for run in row.runs],
    "losses": lambda row: [run.data["losses"] for run in row.runs],
    "grad_norms": lambda row: [run.data["grad_norms"] for run in row.runs],
    "loss_distances": same.step_distances,
    "evidence": lambda row: row.evidence,
    "environment": lambda row: row.first["environment"],
}


def _so_far(run: Run) -> int | None:
    """The bytes that the run's meter had counted when it ended."""
    return run.data["peak_so_far_bytes"] or max(m.sizes(run.ranks, "allocated"), default=None)


def _least_of(run: Run) -> int | None:
    """The predicted need of a run that ran out of memory."""
    out = run.status in ("gpu_oom", "host_oom")
    return p.least(run, run.prediction) if out and p.host_memory(run) else None


UNFINISHED: dict[str, Take] = {
    "recipe": lambda run: run.recipe,
    "status": lambda run: run.status,
    "processes": lambda run: run.spec["processes"],
    "global_batch": lambda run: run.spec["global_batch"],
    "phase": lambda run: run.data["phase"],
    "so_far_bytes": _so_far,
    "predicted_least_bytes": _least_of,
    "available_bytes": lambda run: p.host_memory(run) if _least_of(run) else None,
    "device": lambda run: run.data["environment"].get("device") or run.spec["device"],
    "world": lambda run: run.spec.get("world") or None,
    "reason": lambda run: str if run.status == "void" else run.data["reason"],
    "way_out": lambda run: run.data["way_out"],
}


def differs(found: Any, expected: Any) -> bool:
    """Return whether a value of the JSON is not the recounted one."""
    if expected is str:
        return not found
    if isinstance(expected, list | tuple):
        alike = isinstance(found, list) and len(found) == len(expected)
        return not alike or any(map(differs, found, expected))
    if expected is None or (isinstance(expected, float) and not math.isfinite(expected)):
        return found not in (None, "")
    if isinstance(expected, dict | bool) or not isinstance(expected, int | float):
        return found != expected
    try:
        return not math.isclose(float(found), expected, rel_tol=1e-9, abs_tol=1e-12)
    except (TypeError, ValueError):
        return True


def faults(data: dict[str, Any], results: ResultSet) -> Iterator[str]:
    """Yield a line for each number of a report.json that the raw results do not give."""
    rows = {row.first["command"]: row for row in results.rows}
    for group in data["groups"]:
        known = [rows.pop(entry["command"], None) for entry in group["rows"]]
        for entry, row in zip(group["rows"], known, strict=True):
            yield from _row(entry, row) if row else [f"{entry['label']}: no raw result"]
        if all(known):
            yield from _group(group, known[0].group)
    yield from (f"{row.label} is missing" for row in rows.values())
    ended = {run.data["command"]: run for run in results.unfinished}
    for entry in data["unfinished"]:
        run = ended.pop(entry["command"], None)
        fields = {name: value for name, value in entry.items() if name not in ("spec", "command")}
        yield from (
            _values(fields, UNFINISHED, run) if run else [f"{entry['recipe']}: no raw result"]
        )
    yield from (f"{run.recipe}, {run.status}, is missing" for run in ended.values())
    yield from _memory_only(data.get("memory_only", []), results)


def _memory_only(found: list[dict[str, Any]], results: ResultSet) -> Iterator[str]:
    """Mismatches of runs that were measured side by side."""
    known = {run.data["command"]: run for run in results.memory_only}
    for entry in found:
        run = known.pop(entry["command"], None)
        if run is None:
            yield f"{entry['recipe']}: no raw result"
            continue
        yield from _values({k: entry[k] for k in MEMORY_ONLY}, MEMORY_ONLY, run)
    yield from (f"{run.recipe}, memory only, is missing" for run in known.values())


def _highest(run: Run, count: str) -> int | None:
    """The highest count of any phase of any rank; None if no phase has it."""
    sizes = [phase[count] for rank in run.ranks for phase in rank["phases"].values()]
    return max((size for size in sizes if size is not None), default=None)


def _need(run: Run) -> int | None:
    process = _highest(run, "process")
    return process and max(process, _highest(run, "reserved"), _highest(run, "allocated"))


MEMORY_ONLY: dict[str, Take] = {
    "recipe": lambda run: run.recipe,
    "peak_bytes": lambda run: _highest(run, "allocated"),
    "reserved_peak_bytes": lambda run: _highest(run, "reserved"),
    "need_bytes": _need,
    "beside": lambda run: run.data["beside"],
}


def _values(found: dict[str, Any], rules: dict[str, Take], subject: Row | Run) -> Iterator[str]:
    for name, value in found.items():
        if name not in rules:
            yield f"{subject.recipe}, {name}: no function here recounts it"
        elif differs(value, rules[name](subject)):
            yield f"{subject.recipe}, {name}: {value!r} is not {rules[name](subject)!r}"


def _row(entry: dict[str, Any], row: Row) -> Iterator[str]:
    known = {"spec", "notes", "command"}
    raw = {k: x for k, x in entry.items() if k not in OF_A_ROW and k not in known}
    yield from _values(raw, RAW, row)
    # Fields that a spec did not have when it was written are added as it is read.
    if differs({k: x for k, x in entry["spec"].items() if k in row.spec}, row.spec):
        yield f"{row.recipe}, spec: not as in the raw result"
    for part, rules in OF_A_ROW.items():
        fields = {name: x for name, x in entry.get(part, {}).items() if name != "parts"}
        yield from _values(fields, rules, row)
    for fields in [entry["predicted"]["parts"]] if "predicted" in entry else []:
        names = ("category", "predicted_bytes", "traced_bytes", "error_fraction")
        again = [(one.name, one.predicted, one.traced, one.error) for one in p.parts(row)]
        if differs([[one[name] for name in names] for one in fields], again):
            yield f"{row.recipe}, parts: {fields} is not {again}"


def _group(data: dict[str, Any], group: Group) -> Iterator[str]:
    """Mismatches of what a group says beside its rows."""
    wanted = {
        "device": group.device,
        "meter": group.reference.first["meter"],
        "reference": group.reference.label,
        "answers": [[q, row.label] for q, row in answers.best(group)],
        "fastest_that_fits": [
            answers.within(fit["limit_bytes"], fit["upto_bytes"], group)
            for fit in data["fastest_that_fits"]
        ],
        "noise_floor": noise.of_report(group),
    }
    found = {
        **data,
        "answers": [[one["question"], one["row"]] for one in data["answers"] if one["row"]],
        "fastest_that_fits": [
            [fit["row"], fit["row"], fit["alike"]] for fit in data["fastest_that_fits"]
        ],
        "noise_floor": noise.as_list(data["noise_floor"]),
    }
    for name, value in wanted.items():
        if differs(found[name], value):
            yield f"{group.reference.label}, {name}: {found[name]} is not {value}"

"""The report as CSV and JSON: base units, with the unit in each name."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from harness.report.data import lookup
from harness.report.data.answers import answers, fastest_that_fits
from harness.report.data.rows import Group, Report, Row, Unfinished, Versus
from harness.report.figures import derive
from harness.report.figures.numbers import Numbers
from harness.report.rendering import sentences
from harness.result import Result
from strategies.files import cell

Takes = Mapping[str, Callable[[Any], Any]]
"""Name of a column -> the function from an object to its value."""
# Columns of the CSV: BEFORE, the comparison with the reference, numbers, predictions, AFTER.
BEFORE = (
    *("group", "place", "rank", "recipe", "status", "device", "meter", "processes"),
    "global_batch",
)
VERSUS = tuple(f.name for f in dataclasses.fields(Versus) if f.name not in BEFORE)
NUMBERS = tuple(f.name for f in dataclasses.fields(Numbers))
PREDICTED: Takes = {
    "predicted_by": lambda c: c.method,
    "predicted_step_bytes": lambda c: c.step_predicted,
    "traced_step_bytes": lambda c: c.step_measured,
    "predicted_step_error_fraction": lambda c: c.step_error,
    "predicted_worst_category": lambda c: c.worst and c.worst.name,
    "predicted_worst_category_error_fraction": lambda c: c.worst and c.worst.error,
    "predicted_hosted_bytes": lambda c: c.hosted_predicted,
    "predicted_hosted_error_fraction": lambda c: c.hosted_error,
    "predicted_run_bytes": lambda c: c.run_predicted,
    "predicted_run_error_fraction": lambda c: c.run_error,
    "predicted_reserved_bytes": lambda c: c.reserved_predicted,
    "predicted_reserved_error_fraction": lambda c: c.reserved_error,
}
FIT: Takes = {
    "predicted_least_bytes": lambda fit: fit.need_bytes,
    "available_bytes": lambda fit: fit.have_bytes,
}
CALIBRATED: Takes = {
    "calibrated_step_seconds": lambda c: c.predicted_seconds,
    "calibrated_step_seconds_low": lambda c: c.low_seconds,
    "calibrated_step_seconds_high": lambda c: c.high_seconds,
    "calibrated_step_error_fraction": lambda c: c.error,
    "typical_step_error_fraction": lambda c: c.typical_error,
    "measured_peak_fraction": lambda c: c.peak_fraction,
}
DRAWN: Takes = {
    "latency_seconds_median": lambda d: d.latency_seconds,
    "samples_distance": lambda d: d.away and d.away.relative,
    "samples_distance_worst": lambda d: d.away and d.away.worst,
    "samples_psnr_db": lambda d: d.away and d.away.psnr_db,
    "samples_recognised_fraction": lambda d: d.recognised,
    "samples_agreed_fraction": lambda d: d.agreed,
    "samples_equal_up_to": lambda d: d.limit,
    "samples_echo": lambda d: d.echo,
    "evaluations": lambda d: d.evaluations,
}
AFTER = ("phase", "so_far_bytes", "reason", "way_out", "command")


def csv_text(report: Report) -> str:
    """Return one line for each row, unfinished rows last; an empty cell is an undefined value."""
    stream = io.StringIO()
    rows = [row for group in report.groups for row in group.rows]
    more = [*PREDICTED] if any(row.predicted for row in rows) else []
    more += DRAWN if any(row.drawn for row in rows) else ()
    more += CALIBRATED if any(row.calibrated for row in rows) else ()
    fits = [row.predicted_fit for row in rows] + [gone.predicted_fit for gone in report.unfinished]
    more += FIT if any(fits) else ()
    worlds = ["world"] if any(group.world for group in report.groups) else []
    names = [*BEFORE, *worlds, *VERSUS, *NUMBERS, *more, *AFTER]
    writer = csv.DictWriter(stream, names, "", "ignore", lineterminator="\n")
    writer.writeheader()
    lines = [
        _finished(index, group, row)
        for index, group in enumerate(report.groups, 1)
        for row in group.rows
    ]
    for line in [*lines, *map(_unfinished, report.unfinished)]:
        writer.writerow({name: cell(value) for name, value in line.items()})
    return stream.getvalue()


def _values(takes: Takes, of: object) -> dict[str, Any]:
    """Return the columns of an object; none without one."""
    return {name: take(of) for name, take in takes.items()} if of else {}


def _finished(index: int, group: Group, row: Row) -> dict[str, Any]:
    facts = {
        "group": index,
        "recipe": row.spec.recipe,
        "status": "ok",
        "device": group.device,
        "meter": group.meter,
        "processes": row.spec.processes,
        "world": row.spec.world or None,
        "global_batch": row.spec.global_batch,
        "command": row.first.command,
    }
    derived = {**dataclasses.asdict(row.versus), **dataclasses.asdict(row.numbers)}
    return _with_blanks({**facts, **derived, **_predicted(row), **_values(DRAWN, row.drawn)})


def _predicted(row: Row) -> dict[str, Any]:
    """Return the predictions and their errors, with the unit or kind in each name."""
    calibrated = _values(CALIBRATED, row.calibrated)
    return {**_values(PREDICTED, row.predicted), **calibrated, **_values(FIT, row.predicted_fit)}


def _unfinished(unfinished: Unfinished) -> dict[str, Any]:
    spec = unfinished.result.spec
    facts = {
        "recipe": spec.recipe,
        "status": unfinished.status.value,
        "device": unfinished.result.environment.get("device") or spec.device,
        "processes": spec.processes,
        "world": spec.world or None,
        "global_batch": spec.global_batch,
        "phase": unfinished.result.phase,
        "so_far_bytes": unfinished.so_far_bytes,
        "reason": unfinished.reason,
        "way_out": unfinished.result.way_out,
        "command": unfinished.result.command,
        **_values(FIT, unfinished.predicted_fit),
    }
    return _with_blanks(facts)


def _with_blanks(facts: dict[str, Any]) -> dict[str, Any]:
    """Replace None by an empty cell."""
    return {name: "" if value is None else value for name, value in facts.items()}


def _memory_only(result: Result) -> dict[str, Any]:
    """Return the bytes of a run that shared its device or its machine with others."""
    return {
        "recipe": result.spec.recipe,
        "peak_bytes": derive.peak_of(result.ranks),
        "reserved_peak_bytes": derive.highest(result.ranks, "reserved"),
        "need_bytes": derive.need_bytes(result.ranks, result.meter),
        "beside": result.beside,
        "command": result.command,
        "spec": dataclasses.asdict(result.spec),
    }


def json_text(report: Report) -> str:
    """Return every derived value, with the raw samples behind it."""
    stream = io.StringIO()
    suite = dataclasses.asdict(report.suite)
    data = {
        "schema": "headroom-report-1",
        "suite": _finite(suite),
        "groups": [_group(group) for group in report.groups],
        "unfinished": [
            _finite({**_unfinished(unfinished), "spec": dataclasses.asdict(unfinished.result.spec)})
            for unfinished in report.unfinished
        ],
        "skipped": report.skipped,
    }
    if report.memory_only:
        data["memory_only"] = [_memory_only(result) for result in report.memory_only]
    json.dump(data, stream, indent=1, allow_nan=False)
    stream.write("\n")
    return stream.getvalue()


def _group(group: Group) -> dict[str, Any]:
    """Return a group and its rows, each made finite separately to avoid a second copy in memory."""
    facts = {
        "device": group.device,
        "meter": group.meter,
        "stamp": sentences.stamp(group),
        "warnings": [*sentences.errors(group), *sentences.notes(group)],
        "unlike_first_group": group.unlike or None,
        "reference": group.reference.label,
        "reference_asked_for": group.asked or None,
        "noise_floor": {
            **(dataclasses.asdict(group.floor) if group.floor else {}),
            "text": lookup.noise_floor(group),
        },
        "answers": [
            {"question": a.question, "row": a.row.label if a.row else None, "text": a.text}
            for a in answers(group)
        ],
        "fastest_that_fits": [
            {
                "limit_bytes": f.limit_bytes,
                "upto_bytes": f.upto_bytes,
                "row": f.row.label if f.row else None,
                "alike": [row.label for row in f.alike],
            }
            for f in fastest_that_fits(group)
        ],
    }
    return {**_finite(facts), "rows": [_finite(_row(group, row)) for row in group.rows]}


def _row(group: Group, row: Row) -> dict[str, Any]:
    reference = group.reference.first
    parts = [
        {
            "category": category.name,
            "predicted_bytes": category.predicted,
            "traced_bytes": category.measured,
            "error_fraction": category.error,
        }
        for category in (row.predicted.categories if row.predicted else ())
    ]
    return {
        "label": row.label,
        "notes": row.notes,
        "spec": dataclasses.asdict(row.spec),
        "numbers": dataclasses.asdict(row.numbers),
        "versus_reference": dataclasses.asdict(row.versus),
        "step_seconds": [derive.step_seconds(result) for result in row.results],
        "losses": [result.losses for result in row.results],
        "grad_norms": [result.grad_norms for result in row.results],
        "loss_distances": derive.step_distances(row.first.losses, reference.losses),
        "evidence": row.first.evidence,
        "environment": row.first.environment,
        "command": row.first.command,
        **({"drawn": _values(DRAWN, row.drawn)} if row.drawn else {}),
        **({"predicted": {**_predicted(row), "parts": parts}} if row.predicted else {}),
    }


def _finite(value: Any) -> Any:
    """Return ``value`` in JSON's types: NaN and infinity become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)

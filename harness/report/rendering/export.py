"""The report as one dictionary: ``report.json`` is its dump, ``report.csv`` has its flat rows.

Base units, with the unit in each name.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Iterator
from typing import Any

from harness.report.data import lookup
from harness.report.data.answers import answers
from harness.report.data.rows import Group, Report, Row, Unfinished
from harness.report.figures import derive, samples
from harness.report.rendering import sentences
from strategies.files import cell

COLUMNS = (
    *("group", "rank", "last_rank", "recipe", "status", "device", "processes", "global_batch"),
    *("front", "is_reference", "speed_ratio", "speed_differs", "speed_same"),
    *("need_change_fraction", "parity", "differs_in", "loss_distance", "update_distance"),
    *("samples_distance", "samples_per_second", "step_seconds_median", "step_seconds_p10"),
    *("step_seconds_p90", "noisy", "disturbed_steps", "mfu_fraction", "precision", "peak_bytes"),
    *("need_bytes", "reserved_peak_bytes", "hosted_bytes", "host_total_bytes"),
    *("predicted_step_bytes", "predicted_run_bytes", "calibrated_step_seconds", "phase"),
    *("so_far_bytes", "reason", "way_out", "command"),
)
"""Columns of the CSV, at most forty; ``report.json`` has every number."""


def report_dict(report: Report) -> dict[str, Any]:
    """Return every derived value, with the raw samples behind it, in JSON's types."""
    return {
        "schema": "headroom-report-3",
        "suite": _finite(dataclasses.asdict(report.suite)),
        "summary": sentences.summary(report),
        "groups": [_group(group) for group in report.groups],
        "unfinished": [_finite(_unfinished(unfinished)) for unfinished in report.unfinished],
        "skipped": report.skipped,
    }


def json_text(report: Report) -> str:
    """Return ``report_dict`` as text."""
    return json.dumps(report_dict(report), indent=1, allow_nan=False) + "\n"


def csv_text(report: Report) -> str:
    """Return one line for each row, unfinished rows last; an empty cell is an undefined value."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, "", "ignore", lineterminator="\n")
    writer.writeheader()
    for line in _flat(report_dict(report)):
        shown = {name: "" if value is None else cell(value) for name, value in line.items()}
        writer.writerow(shown)
    return stream.getvalue()


def _flat(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the fields of each row of ``report_dict`` on one level."""
    parts = ("spec", "numbers", "versus_reference", "drawn", "predicted")
    for index, group in enumerate(data["groups"], 1):
        for row in group["rows"]:
            line = {"group": index, "status": "ok"}
            for part in parts:
                line |= row.get(part, {})
            yield line | {"device": group["device"], "command": row["command"]}
    yield from data["unfinished"]


def _group(group: Group) -> dict[str, Any]:
    """Return a group and its rows, each made finite separately to avoid a second copy in memory."""
    floor = dataclasses.asdict(group.floor) if group.floor else {}
    facts = {
        "device": group.device,
        "meter": group.meter,
        "stamp": sentences.stamp(group),
        "warnings": [*sentences.errors(group), *sentences.notes(group)],
        "unlike_first_group": group.unlike or None,
        "reference": group.reference.label,
        "reference_asked_for": group.asked or None,
        "noise_floor": {**floor, "text": lookup.noise_floor(group)},
        "answers": [
            {**answer._asdict(), "row": answer.row and answer.row.label}
            for answer in answers(group)
        ],
    }
    return {**_finite(facts), "rows": [_finite(_row(group, row)) for row in group.rows]}


def _row(group: Group, row: Row) -> dict[str, Any]:
    facts = {
        "label": row.label,
        "notes": row.notes,
        "spec": dataclasses.asdict(row.spec),
        "numbers": dataclasses.asdict(row.numbers),
        "versus_reference": dataclasses.asdict(row.versus),
        "step_seconds": row.runs,
        "losses": [result.losses for result in row.results],
        "grad_norms": [result.grad_norms for result in row.results],
        "loss_distances": derive.step_distances(row.first.losses, group.reference.first.losses),
        "evidence": row.first.evidence,
        "environment": row.first.environment,
        "command": row.first.command,
    }
    if group.reference.first.drawn and row.first.drawn:
        limit = samples.limit(group.reference.first)
        facts["drawn"] = {"samples_distance": row.samples_distance, "samples_equal_up_to": limit}
    memory, _, times = row.predicted
    if memory is None:
        return facts
    foretold: dict[str, Any] = {"predicted_by": memory.method, **_fit(row)}
    for name in ("step", "hosted", "run", "reserved"):
        foretold[f"predicted_{name}_bytes"] = getattr(memory, f"{name}_predicted")
        foretold[f"measured_{name}_bytes"] = getattr(memory, f"{name}_measured")
    if times:
        foretold["calibrated_step_seconds"] = times.predicted_seconds
        foretold["calibrated_step_seconds_low"] = times.low_seconds
        foretold["calibrated_step_seconds_high"] = times.high_seconds
    return facts | {"predicted": foretold}


def _fit(thing: Row | Unfinished) -> dict[str, Any]:
    fit = thing.predicted.fit
    return (
        {"predicted_least_bytes": fit.need_bytes, "available_bytes": fit.have_bytes} if fit else {}
    )


def _unfinished(unfinished: Unfinished) -> dict[str, Any]:
    result, spec = unfinished.result, unfinished.result.spec
    return {
        "recipe": spec.recipe,
        "status": unfinished.status.value,
        "device": result.environment.get("device") or spec.device,
        "processes": spec.processes,
        "global_batch": spec.global_batch,
        "phase": result.phase,
        "so_far_bytes": unfinished.so_far_bytes,
        "reason": unfinished.reason,
        "way_out": result.way_out,
        "command": result.command,
        "spec": dataclasses.asdict(spec),
        **_fit(unfinished),
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

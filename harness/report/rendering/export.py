"""The report as CSV and JSON: base units, with the unit in each name."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable
from typing import Any

from harness.report import derive, words
from harness.report.fit_verdicts import Verdict
from harness.report.numbers import Numbers
from harness.report.predicted import Compared
from harness.report.rows import Group, Report, Row, Unfinished, Versus

__all__ = ["csv_text", "json_text"]

BEFORE = (
    "group",
    "rank",
    "recipe",
    "status",
    "device",
    "meter",
    "processes",
    "global_batch",
)
VERSUS = tuple(f.name for f in dataclasses.fields(Versus) if f.name != "rank")
NUMBERS = tuple(f.name for f in dataclasses.fields(Numbers))
PREDICTED: dict[str, Callable[[Compared], Any]] = {
    "predicted_by": lambda c: c.method,
    "predicted_step_bytes": lambda c: c.step_predicted,
    "traced_step_bytes": lambda c: c.step_measured,
    "predicted_step_error_fraction": lambda c: c.step_error,
    "predicted_worst_category": lambda c: c.worst and c.worst.name,
    "predicted_worst_category_error_fraction": lambda c: c.worst and c.worst.error,
    "predicted_peak_bytes": lambda c: c.peak_predicted,
    "predicted_peak_error_fraction": lambda c: c.peak_error,
    "predicted_reserved_bytes": lambda c: c.reserved_predicted,
    "predicted_reserved_error_fraction": lambda c: c.reserved_error,
}
FIT: dict[str, Callable[[Verdict], Any]] = {
    "predicted_least_bytes": lambda v: v.need_bytes,
    "available_bytes": lambda v: v.have_bytes,
}
AFTER = ("phase", "peak_so_far_bytes", "reason", "way_out", "command")


def csv_text(report: Report) -> str:
    """One line a row, unfinished rows last; an empty cell is a value that is not defined."""
    stream = io.StringIO()
    rows = [row for group in report.groups for row in group.rows]
    more = [*PREDICTED] if any(row.predicted for row in rows) else []
    more += FIT if any(one.fit for one in (*rows, *report.unfinished)) else ()
    worlds = ["world"] if any(group.world for group in report.groups) else []
    names = [*BEFORE, *worlds, *VERSUS, *NUMBERS, *more, *AFTER]
    writer = csv.DictWriter(stream, names, "", "ignore", lineterminator="\n")
    writer.writeheader()
    for index, group in enumerate(report.groups, 1):
        writer.writerows(_flat(index, group, row) for row in group.rows)
    writer.writerows(_gone(one) for one in report.unfinished)
    return stream.getvalue()


def _flat(index: int, group: Group, row: Row) -> dict[str, Any]:
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
    numbers = dataclasses.asdict(row.numbers)
    versus = dataclasses.asdict(row.versus)
    found = {**facts, **versus, **numbers, **_predicted(row)}
    return {k: "" if v is None else v for k, v in found.items()}


def _predicted(row: Row) -> dict[str, Any]:
    """What was predicted and how far off it was, with unit or kind in each name."""
    found = row.predicted
    told = {name: take(found) for name, take in PREDICTED.items()} if found else {}
    return {**told, **_fit(row)}


def _fit(one: Row | Unfinished) -> dict[str, Any]:
    """The least it was predicted to need, and what there was."""
    return {name: take(one.fit) for name, take in FIT.items()} if one.fit else {}


def _gone(one: Unfinished) -> dict[str, Any]:
    spec = one.result.spec
    facts = {
        "recipe": spec.recipe,
        "status": one.status.value,
        "device": one.result.environment.get("device") or spec.device,
        "processes": spec.processes,
        "world": spec.world or None,
        "global_batch": spec.global_batch,
        "phase": one.result.phase,
        "peak_so_far_bytes": one.peak_bytes,
        "reason": one.reason,
        "way_out": one.result.way_out,
        "command": one.result.command,
        **_fit(one),
    }
    return {k: "" if v is None else v for k, v in facts.items()}


def json_text(report: Report) -> str:
    """Everything derived, with the raw samples it was derived from."""
    data = {
        "schema": "headroom-report-1",
        "suite": dataclasses.asdict(report.suite),
        "groups": [_group(group) for group in report.groups],
        "unfinished": [
            {**_gone(one), "spec": dataclasses.asdict(one.result.spec)} for one in report.unfinished
        ],
        "skipped": report.skipped,
    }
    return json.dumps(_finite(data), indent=1, allow_nan=False) + "\n"


def _group(group: Group) -> dict[str, Any]:
    return {
        "device": group.device,
        "meter": group.meter,
        "stamp": words.stamp(group),
        "warnings": words.warnings(group),
        "unlike_first_group": group.unlike or None,
        "reference": group.reference.label,
        "answers": [
            {"question": a.question, "row": a.row.label if a.row else None, "text": a.text}
            for a in words.answers(group)
        ],
        "fastest_that_fits": [
            {
                "limit_bytes": f.limit_bytes,
                "upto_bytes": f.upto_bytes,
                "row": f.row.label if f.row else None,
            }
            for f in words.fits(group)
        ],
        "rows": [_row(group, row) for row in group.rows],
    }


def _row(group: Group, row: Row) -> dict[str, Any]:
    home = group.reference.first
    return {
        "label": row.label,
        "notes": row.notes,
        "spec": dataclasses.asdict(row.spec),
        "numbers": dataclasses.asdict(row.numbers),
        "versus_reference": dataclasses.asdict(row.versus),
        "step_seconds": [derive.step_seconds(result) for result in row.results],
        "losses": [result.losses for result in row.results],
        "grad_norms": [result.grad_norms for result in row.results],
        "loss_distances": derive.step_distances(row.first.losses, home.losses),
        "evidence": row.first.evidence,
        "environment": row.first.environment,
        "command": row.first.command,
        **({"predicted": {**_predicted(row), "parts": _parts(row)}} if row.predicted else {}),
    }


def _parts(row: Row) -> list[dict[str, Any]]:
    """The categories of a step, above 5 % of its peak."""
    return [
        {
            "category": part.name,
            "predicted_bytes": part.predicted,
            "traced_bytes": part.measured,
            "error_fraction": part.error,
        }
        for part in row.predicted.parts
    ]


def _finite(value: Any) -> Any:
    """``value`` without the numbers that JSON has not: NaN and infinity become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)

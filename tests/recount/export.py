"""report.csv and report.json: every number in base units, by its name."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.recount import answers, noise, same, sentences
from tests.recount import measures as m
from tests.recount import predicted as p
from tests.recount import words as w
from tests.recount.cells import GIB, fault
from tests.recount.columns import NUMBERS, UNFINISHED, VERSUS
from tests.recount.drawn import DRAWN
from tests.recount.raw import Group, ResultSet, Row, Run

__all__ = ["csv_faults", "json_faults"]

Take = Callable[[Row], Any]
WHERE: dict[str, Take] = {
    "group": lambda row: 1 + row.group.of.ordered.index(row.group),
    "recipe": lambda row: row.recipe,
    "status": lambda row: "ok",
    "device": lambda row: row.runs[0].device,
    "meter": lambda row: row.first["meter"],
    "processes": lambda row: row.spec["processes"],
    "world": lambda row: row.spec.get("world") or None,
    "global_batch": lambda row: row.spec["global_batch"],
    "command": lambda row: row.first["command"],
    "mfu_missing": lambda row: None if m.mfu_fraction(row) else str,
}
"""``str`` stands for any words."""


def _predicted(take: Take) -> Take:
    return lambda row: take(row) if p.prediction(row) else None


def needed(row: Row) -> int | None:
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
    "predicted_least_bytes": lambda row: needed(row),
    "available_bytes": lambda row: p.host_memory(row.runs[0]) if needed(row) else None,
}
COLUMNS = WHERE | VERSUS | NUMBERS | DRAWN | {name: _predicted(t) for name, t in PREDICTED.items()}
ENDED: dict[str, Callable[[Run], Any]] = {
    "recipe": lambda run: run.spec["recipe"],
    "status": lambda run: run.status,
    "processes": lambda run: run.spec["processes"],
    "global_batch": lambda run: run.spec["global_batch"],
    "phase": lambda run: run.data["phase"],
    "so_far_bytes": w.so_far,
    "predicted_least_bytes": w.predicted_need,
    "available_bytes": lambda run: p.host_memory(run) if w.predicted_need(run) else None,
    "device": lambda run: run.data["environment"].get("device") or run.spec["device"],
    "world": lambda run: run.spec.get("world") or None,
    "reason": UNFINISHED["Why"],
    "way_out": UNFINISHED["Way out"],
    "command": lambda run: run.data["command"],
}
OF_ENDED = ("phase", "so_far_bytes", "reason", "way_out")


def differs(found: Any, expected: Any) -> bool:
    """Whether a value, as CSV's text or as JSON has it, is not the one expected."""
    if expected is str:
        return not found
    if expected is None or (isinstance(expected, float) and not math.isfinite(expected)):
        return found not in (None, "", "inf", "nan")
    if isinstance(expected, bool) or not isinstance(expected, int | float):
        return str(found) != str(expected)
    try:
        return not math.isclose(float(found), expected, rel_tol=1e-9, abs_tol=1e-12)
    except (TypeError, ValueError):
        return True


# ---- CSV ----


def csv_faults(path: Path, results: ResultSet) -> Iterator[str]:
    """Mismatches of a report.csv: every row, every column."""
    with path.open(encoding="utf-8", newline="") as stream:
        lines = list(csv.DictReader(stream))
    rows = {row.first["command"]: row for row in results.rows}
    ended = {run.data["command"]: run for run in results.unfinished}
    if len(lines) != len(rows) + len(ended):
        yield f"{len(lines)} lines, {len(rows) + len(ended)} recounted"
    for line in lines:
        row = rows.get(line["command"])
        if row:
            yield from _values(line, COLUMNS, row, OF_ENDED)
        elif line["command"] in ended:
            run = ended[line["command"]]
            nothing = dict.fromkeys(line, lambda _: None)
            yield from _values(line, nothing | ENDED, run, ())
        else:
            yield f"{line['recipe']}: no raw result has its command"


def _values(
    found: dict[str, Any], columns: dict[str, Callable[[Any], Any]], subject: Any, skip: Any
) -> Iterator[str]:
    name = columns["recipe"](subject) if "recipe" in columns else subject.label
    for head, value in found.items():
        if head in skip:
            continue
        if head not in columns:
            yield f"no rule here for the column {head!r}"
        elif differs(value, columns[head](subject)):
            yield f"{name}, {head}: {value!r} is written, {columns[head](subject)!r} recounted"


# ---- JSON ----


def json_faults(path: Path, results: ResultSet) -> Iterator[str]:
    """Mismatches of a report.json."""
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = {row.first["command"]: row for row in results.rows}
    for group in data["groups"]:
        for entry in group["rows"]:
            row = rows.pop(entry["command"], None)
            yield from _entry(entry, row) if row else [f"{entry['label']}: no raw result"]
        yield from _answers(group, results)
    yield from (f"{row.label} is missing" for row in rows.values())
    ended = {run.data["command"]: run for run in results.unfinished}
    for entry in data["unfinished"]:
        run = ended.pop(entry["command"], None)
        told = {name: value for name, value in entry.items() if name != "spec"}
        yield from _values(told, ENDED, run, ()) if run else [f"{entry['recipe']}: no raw result"]
    yield from (f"{run.recipe}, {run.status}, is missing" for run in ended.values())


RAW: dict[str, Take] = {
    "label": lambda row: row.label,
    "spec": lambda row: row.spec,
    "step_seconds": lambda row: [run.steps for run in row.runs],
    "losses": lambda row: [run.data["losses"] for run in row.runs],
    "grad_norms": lambda row: [run.data["grad_norms"] for run in row.runs],
    "evidence": lambda row: row.evidence,
    "environment": lambda row: row.first["environment"],
    "command": lambda row: row.first["command"],
}
NOTED = ("notes",)


def _entry(entry: dict[str, Any], row: Row) -> Iterator[str]:
    for name, value in entry.items():
        if name == "numbers":
            yield from _values(value, {**COLUMNS, **NUMBERS}, row, ())
        elif name == "drawn":
            yield from _values(value, dict(DRAWN), row, ())
        elif name == "versus_reference":
            yield from _values(value, {**COLUMNS, **VERSUS}, row, ())
        elif name == "predicted":
            told = {k: v for k, v in value.items() if k != "parts"}
            yield from _values(told, COLUMNS, row, ())
            yield from _parts(value["parts"], row)
        elif name == "loss_distances":
            theirs = row.group.reference.first["losses"]
            pairs = zip(row.first["losses"], theirs, strict=False)
            again = [same.curve_distance([a], [b]) for a, b in pairs]
            if any(differs(v, e) for v, e in zip(value, again, strict=True)):
                yield f"{row.label}: loss_distances"
        elif name in RAW:
            # Fields that results had not when they were written are added as they are read.
            again = RAW[name](row)
            if name == "spec":
                value = {k: v for k, v in value.items() if k in again}
            if value != again:
                yield f"{row.label}: {name} is not as in the raw result"
        elif name not in NOTED:
            yield f"no rule here for {name!r} of a row"


def _parts(parts: list[dict[str, Any]], row: Row) -> Iterator[str]:
    again = [
        {
            "category": part.name,
            "predicted_bytes": part.predicted,
            "traced_bytes": part.traced,
            "error_fraction": part.error,
        }
        for part in p.parts(row)
    ]
    if len(parts) != len(again):
        yield f"{row.label}: {len(parts)} categories, {len(again)} recounted"
    for part, other in zip(parts, again, strict=False):
        if set(part) != set(other) or any(differs(part[k], other[k]) for k in part):
            yield f"{row.label}: {part} is written, {other} recounted"


def _answers(data: dict[str, Any], results: ResultSet) -> Iterator[str]:
    """The rows that a group names."""
    commands = {entry["command"] for entry in data["rows"]}
    groups = results.groups
    alike = (g for g in groups if {row.first["command"] for row in g.rows} == commands)
    group = next(alike, None)
    if group is None:
        yield f"no group of the raw results has the rows of {data['reference']}'s"
        return
    if data["reference"] != group.reference.label:
        yield f"the reference is {group.reference.label}, not {data['reference']}"
    for answer in data["answers"]:
        text = f"{answer['question']}: {answer['row']}: {answer['text']}"
        yield from answers.answer_faults(text, group)
    questions = [answer["question"] for answer in data["answers"]]
    yield from answers.missing_answers(questions, group)
    for fit in data["fastest_that_fits"]:
        yield from _fit(fit, group)
    yield from _floor(data["noise_floor"], group)
    if (data["unlike_first_group"] or "") != sentences.unlike(group):
        yield f"unlike the first group: {data['unlike_first_group']}, {sentences.unlike(group)}"
    told, wanted = data["warnings"], sentences.warnings(group)
    pairs = zip(told, wanted, strict=False)
    if len(told) != len(wanted) or not all(sentences.holds(*pair) for pair in pairs):
        yield f"warnings are {told}, recounted {wanted}"
    for name, again in (("device", group.device), ("meter", group.reference.first["meter"])):
        yield from [f"{name} is {data[name]}, not {again}"] * (data[name] != again)


def _floor(data: dict[str, Any], group: Group) -> Iterator[str]:
    """The noise floor, in numbers and in words."""
    words, floor = sentences.floor_words(group) or ("",), noise.floor_of(group)
    wrong = fault(data["text"], words) if data["text"] else words != ("",) and "no words"
    yield from [f"the noise floor: {wrong}"] if wrong else []
    spreads = {"runs": floor.runs, "steps": floor.steps} if floor else {}
    for name, spread in spreads.items():
        again = (spread.deviation, spread.freedom) if spread else (None, None)
        found = data[name] or {"deviation": None, "freedom": None}
        if differs(found["deviation"], again[0]) or found["freedom"] != again[1]:
            yield f"the noise floor's {name} are {found}, not {again}"
    if floor is None:
        yield from ["a noise floor is written"] * (set(data) != {"text"})
        return
    again = {row.label: noise.medians(row) for row in floor.again}
    if list(data["again"]) != list(again) or any(
        differs(found, value)
        for label in again
        for found, value in zip(data["again"][label], again[label], strict=True)
    ):
        yield f"rows measured again are {data['again']}, not {again}"
    if differs(data["fraction"], noise.fraction(group)):
        yield f"the noise floor is {data['fraction']}, not {noise.fraction(group)}"


def _fit(fit: dict[str, Any], group: Group) -> Iterator[str]:
    for size in (fit["limit_bytes"], fit["upto_bytes"] or math.inf):
        row = answers.fastest_within(size, group)
        if fit["row"] != (row and row.label):
            yield f"fits in {size / GIB} GiB: {row and row.label}, not {fit['row']}"
    alike = [row.label for row in answers.alike_within(fit["limit_bytes"], group)]
    if fit["alike"] != alike:
        yield f"fits in {fit['limit_bytes'] / GIB} GiB: {alike} are as fast, not {fit['alike']}"

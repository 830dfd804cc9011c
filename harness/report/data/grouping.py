"""Results as a report: rows of one spec, groups of rows that compare, ranked and set in relation.

Nothing is ranked against a row that did other work or ran on another device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from harness.predict.prediction import Prediction
from harness.report import derive
from harness.report.fit_verdicts import OUT_OF_MEMORY, judge
from harness.report.numbers import numbers
from harness.report.predicted import compare
from harness.report.rows import (
    Group,
    Report,
    Row,
    Suite,
    Unfinished,
    Versus,
    device_of,
    label,
    same_work,
)
from harness.result import Result, Status
from harness.spec import Spec

__all__ = ["build"]


def build(
    results: list[Result],
    skipped: list[str],
    suite: Suite | None = None,
    predictions: Mapping[str, Prediction] | None = None,
) -> Report:
    """Group, derive, compare and rank. ``predictions``: spec key -> what was predicted."""
    suite, predictions = suite or Suite(), predictions or {}
    ended = [(result, *derive.effective_status(result)) for result in results]
    done = [result for result, status, _ in ended if status is Status.OK]
    gone = [
        Unfinished(
            label=label(result.spec),
            status=status,
            reason=reason,
            peak_bytes=result.peak_so_far_bytes or derive.peak_of(result.ranks),
            result=result,
            fit=judge(result, status, predictions.get(result.spec.key), results)
            if status in OUT_OF_MEMORY
            else None,
        )
        for result, status, reason in ended
        if status is not Status.OK
    ]
    ranked = [result for result in done if not result.spec.recorded]
    groups = _groups(_rows(ranked, gone, predictions), suite.reference)
    recorded = [
        result
        for result, status, _ in ended
        if result.spec.recorded and (status is Status.OK or result.recordings)
    ]
    return Report(
        suite=suite, groups=groups, unfinished=gone, recorded=recorded, skipped=list(skipped)
    )


def _rows(
    done: list[Result], gone: list[Unfinished], predictions: Mapping[str, Prediction]
) -> list[Row]:
    found: dict[Any, list[Result]] = {}
    for result in done:
        key = (dataclasses.replace(result.spec, repeat=0), same_work(result))
        found.setdefault(key, []).append(result)
    lost: dict[Spec, list[str]] = {}
    for one in gone:
        spec = dataclasses.replace(one.result.spec, repeat=0)
        lost.setdefault(spec, []).append(one.status.value)
    return [
        Row(
            label=spec.recipe,
            results=tuple(results),
            numbers=numbers(results),
            predicted=compare(results, predictions),
            fit=judge(results[0], Status.OK, predictions.get(results[0].spec.key), done),
            notes=tuple(f"a repetition ended as {word}" for word in lost.get(spec, [])),
        )
        for (spec, _), results in found.items()
    ]


def _groups(rows: list[Row], wanted: str) -> list[Group]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(same_work(row.first), []).append(row)
    # Of several groups with a row of that name, the one with most rows: order of files is chance.
    ordered = sorted(
        found.items(),
        key=lambda item: (item[1][0].spec.world, _distance(item[1], wanted), -len(item[1])),
    )
    first = ordered[0][0] if ordered else ()
    return [_group(members, wanted, _unlike(work, first)) for work, members in ordered]


def _unlike(work: tuple[Any, ...], first: tuple[Any, ...]) -> str:
    there = dict(first)
    changed = [f"{k} {v} (not {there.get(k)})" for k, v in work if there.get(k) != v]
    return ", ".join(changed)


def _distance(rows: list[Row], wanted: str) -> int:
    """0 for a group with the wanted row, 1 for one with plain ddp, 2 for others."""
    return next((i for i, name in enumerate((wanted, "ddp")) if _has(rows, name)), 2)


def _has(rows: list[Row], name: str) -> bool:
    parts = sorted(name.split("+"))
    return any(sorted(row.spec.recipe.split("+")) == parts for row in rows)


def _named(rows: list[Row], wanted: str) -> Row | None:
    """The row of the wanted recipe, however its parts are ordered; else that of plain ddp."""
    for name in (wanted, "ddp"):
        parts = sorted(name.split("+"))
        for row in rows:
            if sorted(row.spec.recipe.split("+")) == parts:
                return row
    return None


def _reference(rows: list[Row], wanted: str) -> Row:
    """The named row, or the plainest of those that promise the exact computation."""
    exact = [row for row in rows if row.first.parity == "exact"]
    return _named(rows, wanted) or min(exact or rows, key=lambda r: r.spec.recipe.count("+"))


def _group(members: list[Row], wanted: str, unlike: str) -> Group:
    members = _labelled(members)
    reference = _reference(members, wanted)
    best = sorted(members, key=_smallest if reference.spec.world else _fastest)
    compared = [_compare(row, reference, rank) for rank, row in enumerate(best, 1)]
    rows = _with_front(compared)
    home = next(row for row in rows if row.versus.is_reference)
    first = home.first
    return Group(
        rows=rows, reference=home, meter=first.meter, device=device_of(first), unlike=unlike
    )


def _fastest(row: Row) -> float:
    return -row.numbers.samples_per_second


def _smallest(row: Row) -> float:
    return row.numbers.peak_bytes or math.inf


def _labelled(rows: list[Row]) -> list[Row]:
    recipes = [row.label for row in rows]
    twice = {recipe for recipe in recipes if recipes.count(recipe) > 1}
    return [
        dataclasses.replace(row, label=f"{row.label} x{row.spec.processes}")
        if row.label in twice
        else row
        for row in rows
    ]


def _compare(row: Row, reference: Row, rank: int) -> Row:
    ours, theirs, home = row.numbers, reference.numbers, reference.first
    loss = _worst([derive.curve_distance(r.losses, home.losses) for r in row.results])
    grad = _worst([derive.curve_distance(r.grad_norms, home.grad_norms) for r in row.results])
    word = derive.verdict(row.first.parity, home.parity, loss, grad)
    peaks = (ours.peak_bytes, theirs.peak_bytes)
    versus = Versus(
        rank=rank,
        front=False,
        is_reference=row is reference,
        speed_ratio=ours.samples_per_second / theirs.samples_per_second,
        peak_change_fraction=peaks[0] / peaks[1] - 1 if all(peaks) else None,
        loss_distance=loss,
        grad_norm_distance=grad,
        parity="reference" if row is reference else word,
    )
    return dataclasses.replace(row, versus=versus)


def _worst(distances: list[float | None]) -> float | None:
    return max((d for d in distances if d is not None), default=None)


def _with_front(rows: list[Row]) -> list[Row]:
    """Mark the front. A row that computes something else than it should cannot be on it."""
    able = [
        r
        for r in rows
        if r.versus.parity != "DIFFERS" and r.numbers.peak_bytes is not None and not r.spec.world
    ]
    points = [(r.numbers.peak_bytes, r.numbers.samples_per_second) for r in able]
    front = {id(able[i]) for i in derive.pareto_front(points)}
    return [
        dataclasses.replace(r, versus=dataclasses.replace(r.versus, front=id(r) in front))
        for r in rows
    ]

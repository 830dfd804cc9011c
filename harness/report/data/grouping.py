"""Construction of a report from results: rows of one spec, and groups of comparable rows, ranked.

No row is ranked with one that did other work or ran on another device.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness import hooks
from harness.prediction import Prediction
from harness.report.data.lookup import differ, margin_fraction
from harness.report.data.lookup import same as same_speed
from harness.report.data.rows import (
    FREE,
    Group,
    Report,
    Row,
    SuiteHead,
    Unfinished,
    Versus,
    device_of,
    label,
    same_work,
)
from harness.report.figures import derive, parity, samples
from harness.report.figures.floor import Floor, Runs, borrowed, floor_of, margin_shares
from harness.report.figures.numbers import numbers
from harness.report.figures.predicted import OUT_OF_MEMORY, Comparison, machine_facts
from harness.result import Result, Status
from harness.spec import Spec
from harness.void import shown_status

# ---- noise and ranks ----


def own_floor(rows: list[Row], reference: Row) -> Floor | None:
    """Return the noise floor of rows that do the same work; None if none of them ran twice."""
    return floor_of(_runs(rows), reference.label)


def lent_floor(group: Group, others: list[Group]) -> Floor | None:
    """Return the group's own noise floor, else that of the first group on the same device."""
    if group.floor:
        return group.floor
    able = (g for g in others if g.floor and (g.device, g.meter) == (group.device, group.meter))
    lender = next(able, None)
    if lender is None:
        return None
    spec = lender.reference.spec
    source = f"{spec.model} at batch {spec.global_batch}"
    return borrowed(lender.floor, source, _runs(group.rows), group.reference.label)


def _runs(rows: list[Row]) -> dict[str, Runs]:
    return {row.label: row.runs for row in rows}


def _ranks(rows: list[Row]) -> list[tuple[int, int]]:
    """Return for each row, fastest first, the best and the worst rank that the noise leaves it."""
    floor = rows[0].floor if rows else None
    if floor is None:
        return [(place, place) for place in range(1, len(rows) + 1)]
    logs = [math.log(row.numbers.step_seconds_median) for row in rows]
    shares = [margin_shares(floor, row.runs) for row in rows]

    def near(one: int, other: int) -> bool:
        margin = max(map(operator.add, shares[one], shares[other]))
        return abs(logs[one] - logs[other]) <= math.sqrt(margin)

    ranks = [[place, place] for place in range(1, len(rows) + 1)]
    for slower in range(len(rows)):
        for faster in range(slower):
            if near(slower, faster):
                ranks[slower][0] -= 1
                ranks[faster][1] += 1
    return [(first, last) for first, last in ranks]


# ---- replaced references ----


def same_recipe(one: str, other: str) -> bool:
    """Return True if two recipes have the same parts, in any order."""
    return sorted(one.split("+")) == sorted(other.split("+"))


def with_asked(
    groups: Sequence[Group], wanted: str, unfinished: Sequence[Unfinished]
) -> list[Group]:
    """Return ``groups``; one whose reference replaces the ``wanted`` recipe names that recipe.

    It replaces one that did not finish or is missing, and the report must state this. A group of
    other work has its own reference. It names the recipe only if that was tried on its work.
    """
    there = [row.spec.recipe for group in groups for row in group.rows]
    measured = any(same_recipe(recipe, wanted) for recipe in there)
    tried = [u for u in unfinished if same_recipe(u.result.spec.recipe, wanted)]
    return [_with_asked(group, wanted, tried, measured) for group in groups]


def _with_asked(group: Group, wanted: str, tried: Sequence[Unfinished], measured: bool) -> Group:
    if not wanted or same_recipe(group.reference.spec.recipe, wanted):
        return group
    here = [u for u in tried if _work(u.result.spec) == _work(group.reference.spec)]
    if measured and not here:
        return group
    ended = next((u.status.value for u in here or tried), "")
    reference = dataclasses.replace(
        group.reference, notes=(*group.reference.notes, f"in place of {wanted}")
    )
    rows = [reference if row is group.reference else row for row in group.rows]
    return dataclasses.replace(
        group, rows=rows, reference=reference, asked=wanted, asked_ended=ended
    )


def _work(spec: Spec) -> Spec:
    """Return a spec without the fields in which rows of one ranking may differ."""
    usual: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Spec)}
    return dataclasses.replace(spec, **{n: usual[n] for n in FREE} | {"recipe": ""})


# ---- the whole report ----


PLAIN = "ddp"
"""Default reference of a set."""
Foretold = Callable[[Sequence[Result], Status], Comparison]
"""Returns the predictions beside the repetitions of one row, which ended so."""


def build(
    results: list[Result],
    skipped: list[str],
    suite: SuiteHead | None = None,
    predictions: Mapping[str, Prediction] | None = None,
) -> Report:
    """Group, derive, compare and rank the results; ``predictions`` maps a spec's key to its own."""
    suite = suite or SuiteHead()
    machines = machine_facts(results)

    compare = hooks.planner("compare_with_predictions")

    def foretold(repetitions: Sequence[Result], status: Status) -> Comparison:
        found: Comparison = compare(
            repetitions, status, predictions or {}, machines, suite.calibration
        )
        return found

    ends = [(result, *shown_status(result)) for result in results]
    finished = [result for result, status, _ in ends if status is Status.OK]
    unfinished = [
        _unfinished(result, status, reason, foretold)
        for result, status, reason in ends
        if status is not Status.OK
    ]
    ranked = [r for r in finished if not r.spec.recorded]
    recorded = [
        result
        for result, status, _ in ends
        if result.spec.recorded and (status is Status.OK or result.recordings)
    ]
    groups = _groups(_rows(ranked, unfinished, foretold), suite.reference)
    return Report(
        suite=suite,
        groups=with_asked(groups, suite.reference, unfinished),
        unfinished=unfinished,
        recorded=recorded,
        skipped=list(skipped),
    )


def _unfinished(
    result: Result, status: Status, reason: str | None, foretold: Foretold
) -> Unfinished:
    return Unfinished(
        label=label(result.spec),
        status=status,
        reason=reason,
        so_far_bytes=result.peak_so_far_bytes or derive.highest(result.ranks, "allocated"),
        result=result,
        predicted_fit=foretold([result], status).fit if status in OUT_OF_MEMORY else None,
    )


def _rows(ranked: list[Result], unfinished: list[Unfinished], foretold: Foretold) -> list[Row]:
    """Return one row for the repetitions of each spec."""
    repetitions: dict[Any, list[Result]] = {}
    for result in ranked:
        key = (dataclasses.replace(result.spec, repeat=0), same_work(result))
        repetitions.setdefault(key, []).append(result)
    lost: dict[Spec, list[str]] = {}
    for ended in unfinished:
        spec = dataclasses.replace(ended.result.spec, repeat=0)
        lost.setdefault(spec, []).append(f"a repetition ended as {ended.status.value}")
    rows = []
    for (spec, _), results in repetitions.items():
        found = foretold(results, Status.OK)
        row = Row(
            label=spec.recipe,
            results=tuple(results),
            notes=tuple(lost.get(spec, ())),
            numbers=numbers(results),
            predicted=found.memory,
            predicted_fit=found.fit,
            calibrated=found.times,
        )
        rows.append(row)
    return rows


# ---- groups ----


def _groups(rows: list[Row], wanted: str) -> list[Group]:
    """Group rows of the same work; the group with the ``wanted`` reference row is first."""
    members: dict[Any, list[Row]] = {}
    for row in rows:
        members.setdefault(same_work(row.first), []).append(row)

    def order(same: list[Row]) -> tuple[int, ...]:
        """Sort by the number of rows, because the order of files is arbitrary."""
        most = max(len(row.results) for row in same)
        place = 0 if _named(same, wanted) else 1 if _named(same, PLAIN) else 2
        return place, -len(same), -most

    ordered = sorted(members.items(), key=lambda item: order(item[1]))
    first = dict(ordered[0][0]) if ordered else {}
    drafts = []
    for work, same in ordered:
        unlike = [f"{k} {v} (not {first.get(k)})" for k, v in work if first.get(k) != v]
        drafts.append(_draft(same, wanted, ", ".join(unlike)))
    lenders = [draft for draft in drafts if draft.floor]
    return [_group(draft, lent_floor(draft, lenders)) for draft in drafts]


def _named(rows: list[Row], recipe: str) -> Row | None:
    """Return the row of ``recipe``, with its parts in any order."""
    return next((row for row in rows if same_recipe(row.spec.recipe, recipe)), None)


def _reference(rows: list[Row], wanted: str) -> Row:
    """Return the wanted row, else plain ddp, else the exact row with the fewest parts."""
    exact = [row for row in rows if row.first.parity == "exact"]
    named = _named(rows, wanted) or _named(rows, PLAIN)
    return named or min(exact or rows, key=lambda row: row.spec.recipe.count("+"))


def _draft(members: list[Row], wanted: str, unlike: str) -> Group:
    """Return a group whose rows are not yet compared."""
    rows = _labelled(members)
    reference = _reference(rows, wanted)
    first = reference.first
    return Group(
        rows=rows,
        reference=reference,
        meter=first.meter,
        device=device_of(first),
        unlike=unlike,
        floor=own_floor(rows, reference),
    )


def _group(draft: Group, floor: Floor | None) -> Group:
    """Return the group with its noise floor and its rows, compared and sorted."""
    place = draft.rows.index(draft.reference)
    members = [dataclasses.replace(row, floor=floor) for row in draft.rows]
    reference = members[place]

    best_first = sorted(members, key=lambda row: -row.numbers.samples_per_second)
    places = enumerate(zip(best_first, _ranks(best_first), strict=True), 1)
    found = [_against(row, reference, place, ranks) for place, (row, ranks) in places]
    front, first = _front(best_first, found), reference.first
    rows = []
    for index, (row, versus) in enumerate(zip(best_first, found, strict=True)):
        both, is_reference = row.first.drawn and first.drawn, row is reference
        drawn = samples.drawn_row(row.results, first, is_reference=is_reference) if both else None
        versus = dataclasses.replace(versus, front=index in front)
        rows.append(dataclasses.replace(row, versus=versus, drawn=drawn))
    reference = next(row for row in rows if row.versus.is_reference)
    return dataclasses.replace(draft, rows=rows, reference=reference, floor=floor)


def _labelled(rows: list[Row]) -> list[Row]:
    """Add the number of processes to labels of recipes that ran on several numbers."""
    count = Counter(row.label for row in rows)

    def name(row: Row) -> str:
        nodes = f" on {row.spec.nodes} nodes" if row.spec.nodes > 1 else ""
        return f"{row.label} x{row.spec.processes}{nodes}"

    several = {id(row): name(row) for row in rows if count[row.label] > 1}
    return [dataclasses.replace(row, label=several.get(id(row), row.label)) for row in rows]


# ---- comparison with the reference ----


def _against(row: Row, reference: Row, place: int, ranks: tuple[int, int]) -> Versus:
    """Return a row's relation to the reference."""
    ours, theirs, first = row.numbers, reference.numbers, reference.first
    found = [parity.distances(result, first) for result in row.results]
    far = {
        measure: max((d[measure] for d in found if measure in d), default=None)
        for measure in ("loss", "norm", "update")
    }
    verdict = _verdict(row, reference)
    needs = (ours.need_bytes, theirs.need_bytes)
    return Versus(
        place=place,
        rank=ranks[0],
        last_rank=ranks[1],
        front=False,
        is_reference=row is reference,
        speed_ratio=ours.samples_per_second / theirs.samples_per_second,
        speed_differs=None if row is reference else differ(row, reference),
        speed_same=row is not reference and same_speed(row, reference),
        speed_margin_fraction=None if row is reference else margin_fraction(row, reference),
        need_change_fraction=needs[0] / needs[1] - 1 if all(needs) else None,
        loss_distance=far["loss"],
        grad_norm_distance=far["norm"],
        update_distance=far["update"],
        parity="reference" if row is reference else verdict.word,
        differs_in=verdict.what,
    )


def _verdict(row: Row, reference: Row) -> parity.Verdict:
    """Return the first bad verdict of the repetitions, else the first one."""
    if reference.first.drawn:
        verdicts = [samples.against(result, reference.first) for result in row.results]
    elif unknown := parity.unrepeatable(reference.results):
        return parity.Verdict("not comparable", unknown)
    else:
        allowed = parity.limits(reference.results)
        verdicts = [parity.against_the_reference(r, reference.first, allowed) for r in row.results]
    return next((verdict for verdict in verdicts if verdict.what), verdicts[0])


def _front(rows: list[Row], found: list[Versus]) -> set[int]:
    """Return the indices of the front. A row with a wrong computation cannot be on it."""
    able = [
        index
        for index, (row, versus) in enumerate(zip(rows, found, strict=True))
        if not versus.wrong and row.numbers.need_bytes is not None
    ]
    points = [(rows[i].numbers.need_bytes, rows[i].numbers.samples_per_second) for i in able]
    return {able[i] for i in derive.pareto_front(points)}

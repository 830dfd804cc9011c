"""Construction of a report from results: rows of one spec, and groups of comparable rows, ranked.

No row is ranked with one that did other work or ran on another device.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from harness import hooks
from harness.prediction import Prediction
from harness.report.data import lookup
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
from harness.report.figures.floor import Floor, borrowed, floor_of, margin_shares
from harness.report.figures.numbers import numbers
from harness.report.figures.predicted import OUT_OF_MEMORY, Comparison, machine_facts
from harness.resolve import run_name
from harness.result import Result, Status
from harness.spec import Spec
from harness.void import shown_status

PLAIN = "ddp"
"""Default reference of a set."""
Foretold = Callable[[Sequence[Result], Status], Comparison]
"""Returns the predictions beside the repetitions of one row, which ended so."""
Made = TypeVar("Made")
FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


def build(
    results: list[Result],
    skipped: list[str],
    suite: SuiteHead | None = None,
    predictions: Mapping[str, Prediction] | None = None,
) -> Report:
    """Group, derive, compare and rank the results; ``predictions`` maps a spec's key to its own."""
    suite = suite or SuiteHead()
    machines, compare = machine_facts(results), hooks.planner("compare_with_predictions")

    def foretold(repetitions: Sequence[Result], status: Status) -> Comparison:
        found: Comparison = compare(
            repetitions, status, predictions or {}, machines, suite.calibration
        )
        return found

    report = Report(suite=suite, skipped=list(skipped))
    ranked = []
    for result in results:
        status, reason = shown_status(result)
        if result.spec.recorded and (status is Status.OK or result.recordings):
            report.recorded.append(result)
        if status is not Status.OK:
            ended = Unfinished(
                label=label(result.spec),
                status=status,
                reason=reason,
                so_far_bytes=result.peak_so_far_bytes or derive.highest(result.ranks, "allocated"),
                result=result,
                predicted_fit=foretold([result], status).fit if status in OUT_OF_MEMORY else None,
            )
            report.unfinished.append(ended)
        elif not result.spec.recorded:
            ranked.append(result)
    groups = _groups(_rows(ranked, report.unfinished, foretold), suite.reference)
    report.groups.extend(with_asked(groups, suite.reference, report.unfinished))
    return report


def of_usable(
    results: Sequence[Result],
    skipped: Sequence[str],
    suite: SuiteHead,
    predictions: Mapping[str, Prediction],
    render: Callable[[Report], Made],
) -> Made:
    """Return ``render`` of the report of all usable files; ``Report.skipped`` names the others.

    The typed reader (``harness.json_files.build``) has already checked the types. This function
    handles values of the right type from which nothing can be derived.

    Raises:
        Exception: the error of ``render``, if no single file causes it.
    """
    left_out, plain = list(skipped), dataclasses.replace(suite, calibration=None)

    def made(some: Sequence[Result], head: SuiteHead, named: Mapping[str, Prediction]) -> Made:
        return render(build(list(some), left_out, head, named))

    def leave_out(name: str, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        left_out.append(f"{name}: {type(error).__name__}: {error} ({where})")

    try:
        return made(results, suite, predictions)
    except FAULTS:
        usable = []
    for result in results:
        try:
            made([result], plain, {})
            usable.append(result)
        except FAULTS as error:
            leave_out(f"runs/{run_name(result.spec)}", error)
    try:
        return made(usable, suite, predictions)
    except FAULTS as error:
        if not predictions and suite.calibration is None:
            raise
        leave_out("prediction.json or calibration.json", error)
    return made(usable, plain, {})


# ---- rows and groups ----


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
    for work, rows_there in ordered:
        unlike = [f"{k} {v} (not {first.get(k)})" for k, v in work if first.get(k) != v]
        same = _labelled(rows_there)
        reference = _reference(same, wanted)
        draft = Group(
            rows=same,
            reference=reference,
            meter=reference.first.meter,
            device=device_of(reference.first),
            unlike=", ".join(unlike),
            floor=floor_of({row.label: row.runs for row in same}, reference.label),
        )
        drafts.append(draft)
    lenders = [draft for draft in drafts if draft.floor]
    return [_compared(draft, draft.floor or _lent_floor(draft, lenders)) for draft in drafts]


def same_recipe(one: str, other: str) -> bool:
    """Return True if two recipes have the same parts, in any order."""
    return sorted(one.split("+")) == sorted(other.split("+"))


def _named(rows: list[Row], recipe: str) -> Row | None:
    return next((row for row in rows if same_recipe(row.spec.recipe, recipe)), None)


def _reference(rows: list[Row], wanted: str) -> Row:
    """Return the wanted row, else plain ddp, else the exact row with the fewest parts."""
    exact = [row for row in rows if row.first.parity == "exact"]
    named = _named(rows, wanted) or _named(rows, PLAIN)
    return named or min(exact or rows, key=lambda row: row.spec.recipe.count("+"))


def _labelled(rows: list[Row]) -> list[Row]:
    """Add the number of processes to labels of recipes that ran on several numbers."""
    count = Counter(row.label for row in rows)

    def name(row: Row) -> str:
        nodes = f" on {row.spec.nodes} nodes" if row.spec.nodes > 1 else ""
        return f"{row.label} x{row.spec.processes}{nodes}" if count[row.label] > 1 else row.label

    return [dataclasses.replace(row, label=name(row)) for row in rows]


def _lent_floor(group: Group, lenders: list[Group]) -> Floor | None:
    """Return the noise floor of the first group on the same device."""
    here = (group.device, group.meter)
    lender = next((g for g in lenders if (g.device, g.meter) == here), None)
    if lender is None:
        return None
    spec = lender.reference.spec
    source = f"{spec.model} at batch {spec.global_batch}"
    runs = {row.label: row.runs for row in group.rows}
    return borrowed(lender.floor, source, runs, group.reference.label)


# ---- comparison with the reference ----


def _compared(draft: Group, floor: Floor | None) -> Group:
    """Return the group with its noise floor and its rows, compared and sorted."""
    place = draft.rows.index(draft.reference)
    members = [dataclasses.replace(row, floor=floor) for row in draft.rows]
    reference, first = members[place], members[place].first
    best_first = sorted(members, key=lambda row: -row.numbers.samples_per_second)
    places = enumerate(zip(best_first, _ranks(best_first), strict=True), 1)
    found = [_against(row, reference, place, ranks) for place, (row, ranks) in places]
    able = [
        index
        for index, (row, versus) in enumerate(zip(best_first, found, strict=True))
        if not versus.wrong and row.numbers.need_bytes is not None
    ]  # a row with a wrong computation cannot be on the front
    points = [(n.need_bytes, n.samples_per_second) for n in (best_first[i].numbers for i in able)]
    front = {able[i] for i in derive.pareto_front(points)}
    rows = []
    for index, (row, versus) in enumerate(zip(best_first, found, strict=True)):
        drawn = None
        if row.first.drawn and first.drawn:
            drawn = samples.drawn_row(row.results, first, is_reference=row is reference)
        versus = dataclasses.replace(versus, front=index in front)
        rows.append(dataclasses.replace(row, versus=versus, drawn=drawn))
    reference = next(row for row in rows if row.versus.is_reference)
    return dataclasses.replace(draft, rows=rows, reference=reference, floor=floor)


def _ranks(rows: list[Row]) -> list[tuple[int, int]]:
    """Return for each row, fastest first, the best and the worst rank that the noise leaves it."""
    ranks = [[place, place] for place in range(1, len(rows) + 1)]
    if rows and (floor := rows[0].floor) is not None:
        logs = [math.log(row.numbers.step_seconds_median) for row in rows]
        shares = [margin_shares(floor, row.runs) for row in rows]
        for slower in range(len(rows)):
            for faster in range(slower):
                margin = max(map(operator.add, shares[slower], shares[faster]))
                if abs(logs[slower] - logs[faster]) <= math.sqrt(margin):
                    ranks[slower][0] -= 1
                    ranks[faster][1] += 1
    return [(first, last) for first, last in ranks]


def _against(row: Row, reference: Row, place: int, ranks: tuple[int, int]) -> Versus:
    """Return a row's relation to the reference."""
    ours, theirs, first = row.numbers, reference.numbers, reference.first
    found = [parity.distances(result, first) for result in row.results]
    far = {
        measure: max((d[measure] for d in found if measure in d), default=None)
        for measure in ("loss", "norm", "update")
    }
    verdict = _verdict(row, reference)
    needs, is_reference = (ours.need_bytes, theirs.need_bytes), row is reference
    return Versus(
        place=place,
        rank=ranks[0],
        last_rank=ranks[1],
        front=False,
        is_reference=is_reference,
        speed_ratio=ours.samples_per_second / theirs.samples_per_second,
        speed_differs=None if is_reference else lookup.differ(row, reference),
        speed_same=not is_reference and lookup.same(row, reference),
        need_change_fraction=needs[0] / needs[1] - 1 if all(needs) else None,
        loss_distance=far["loss"],
        grad_norm_distance=far["norm"],
        update_distance=far["update"],
        parity="reference" if is_reference else verdict.word,
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


# ---- replaced references ----


def with_asked(
    groups: Sequence[Group], wanted: str, unfinished: Sequence[Unfinished]
) -> list[Group]:
    """Return ``groups``; one whose reference replaces the ``wanted`` recipe names that recipe.

    It replaces one that did not finish or is missing, and the report must state this. A group of
    other work has its own reference. It names the recipe only if that was tried on its work.
    """
    usual: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Spec)}
    free = {name: usual[name] for name in FREE} | {"recipe": ""}

    def work(spec: Spec) -> Spec:
        return dataclasses.replace(spec, **free)

    measured = any(_named(group.rows, wanted) for group in groups)
    tried = [u for u in unfinished if same_recipe(u.result.spec.recipe, wanted)]
    found = []
    for group in groups:
        own = group.reference
        here = [u for u in tried if work(u.result.spec) == work(own.spec)]
        if wanted and not same_recipe(own.spec.recipe, wanted) and (here or not measured):
            ended = next((u.status.value for u in here or tried), "")
            reference = dataclasses.replace(own, notes=(*own.notes, f"in place of {wanted}"))
            rows = [reference if row is own else row for row in group.rows]
            group = dataclasses.replace(
                group, rows=rows, reference=reference, asked=wanted, asked_ended=ended
            )
        found.append(group)
    return found

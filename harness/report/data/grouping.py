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
    Group,
    Report,
    Row,
    SuiteHead,
    Unfinished,
    Versus,
    label,
    same_work,
    work_of,
)
from harness.report.figures import derive, parity, samples
from harness.report.figures.floor import floor_of, margin_shares
from harness.report.figures.numbers import numbers
from harness.report.figures.predicted import OUT_OF_MEMORY, Predicted, machine_facts
from harness.resolve import run_name
from harness.result import Result, Status
from harness.void import shown_status

PLAIN = "ddp"
"""Default reference of a set."""
Made = TypeVar("Made")
FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


def build(
    results: Sequence[Result],
    skipped: Sequence[str],
    suite: SuiteHead | None = None,
    predictions: Mapping[str, Prediction] | None = None,
) -> Report:
    """Group, derive, compare and rank the results; ``predictions`` maps a spec's key to its own."""
    report = Report(suite=suite or SuiteHead(), skipped=list(skipped))
    compare = hooks.planner("compare_with_predictions")
    known = (predictions or {}, machine_facts(results), report.suite.calibration)
    repetitions: dict[Any, list[Result]] = {}
    lost: dict[Any, list[str]] = {}
    for result in results:
        status, reason = shown_status(result)
        once = dataclasses.replace(result.spec, repeat=0)
        if result.spec.recorded and (status is Status.OK or result.recordings):
            report.recorded.append(result)
        if status is not Status.OK:
            out = status in OUT_OF_MEMORY
            ended = Unfinished(
                label=label(result.spec),
                status=status,
                reason=reason,
                so_far_bytes=result.peak_so_far_bytes or derive.highest(result.ranks, "allocated"),
                result=result,
                predicted=compare([result], status, *known) if out else Predicted(),
            )
            report.unfinished.append(ended)
            lost.setdefault(once, []).append(f"a repetition ended as {status.value}")
        elif not result.spec.recorded:
            repetitions.setdefault((once, same_work(result)), []).append(result)
    rows = []
    for (spec, _), some in repetitions.items():
        row = Row(
            label=spec.recipe,
            results=some,
            notes=list(lost.get(spec, ())),
            numbers=numbers(some),
            predicted=compare(some, Status.OK, *known),
        )
        rows.append(row)
    report.groups = _groups(rows, report.suite.reference)
    _name_missing(report)
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
    plain = dataclasses.replace(suite, calibration=None)
    left_out = list(skipped)

    def leave_out(name: str, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        left_out.append(f"{name}: {type(error).__name__}: {error} ({where})")

    try:
        return render(build(results, left_out, suite, predictions))
    except FAULTS:
        usable = []
    for result in results:
        try:
            render(build([result], left_out, plain))
            usable.append(result)
        except FAULTS as error:
            leave_out(f"runs/{run_name(result.spec)}", error)
    try:
        return render(build(usable, left_out, suite, predictions))
    except FAULTS as error:
        if not predictions and suite.calibration is None:
            raise
        leave_out("prediction.json or calibration.json", error)
    return render(build(usable, left_out, plain))


# ---- groups ----


def _groups(rows: list[Row], wanted: str) -> list[Group]:
    """Group rows of the same work; the group with the ``wanted`` reference row is first."""
    members: dict[Any, list[Row]] = {}
    for row in rows:
        members.setdefault(same_work(row.first), []).append(row)

    def order(item: tuple[Any, list[Row]]) -> tuple[int, ...]:
        """Sort by the number of rows, because the order of files is arbitrary."""
        same = item[1]
        place = 0 if _named(same, wanted) else 1 if _named(same, PLAIN) else 2
        return place, -len(same), -max(len(row.results) for row in same)

    groups: list[Group] = []
    first: dict[str, Any] = {}
    for work, same in sorted(members.items(), key=order):
        first = first or dict(work)
        unlike = [f"{k} {v} (not {first.get(k)})" for k, v in work if first.get(k) != v]
        _add_processes(same)
        reference = _reference(same, wanted)
        groups.append(Group(rows=same, reference=reference, unlike=", ".join(unlike)))
    _measure_noise(groups)
    for group in groups:
        _rank(group)
    return groups


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


def _add_processes(rows: list[Row]) -> None:
    """Add the number of processes to labels of recipes that ran on several numbers."""
    count = Counter(row.label for row in rows)
    for row in rows:
        if count[row.label] > 1:
            nodes = f" on {row.spec.nodes} nodes" if row.spec.nodes > 1 else ""
            row.label += f" x{row.spec.processes}{nodes}"


def _measure_noise(groups: list[Group]) -> None:
    """Set each group's noise floor.

    One without a repeated row borrows that of the first group on the same device, if any.
    """
    lenders: dict[tuple[str, str], Group] = {}
    for group in groups:
        group.floor = floor_of(group.runs, group.reference.label)
        if group.floor:
            lenders.setdefault((group.device, group.meter), group)
    for group in groups:
        lender = lenders.get((group.device, group.meter))
        if group.floor is None and lender:
            spec = lender.reference.spec
            source = f"{spec.model} at batch {spec.global_batch}"
            group.floor = floor_of(group.runs, group.reference.label, lender.floor, source)


# ---- comparison with the reference ----


def _rank(group: Group) -> None:
    """Sort the rows of a group, fastest first, and compare each with the reference."""
    rows, reference = group.rows, group.reference
    rows.sort(key=lambda row: -row.numbers.samples_per_second)
    for row in rows:
        row.floor = group.floor
    for place, (row, ranks) in enumerate(zip(rows, _ranks(group), strict=True), 1):
        row.versus = _against(row, reference, place, ranks)
        if row is not reference:
            row.samples_distance = samples.furthest(row.results, reference.first)
    # A row with a wrong computation cannot be on the front.
    able = [r for r in rows if not r.versus.wrong and r.numbers.need_bytes is not None]
    points = [(row.numbers.need_bytes, row.numbers.samples_per_second) for row in able]
    for index in derive.pareto_front(points):
        able[index].versus.front = True


def _ranks(group: Group) -> list[list[int]]:
    """Return for each row, fastest first, the best and the worst rank that the noise leaves it."""
    rows, floor = group.rows, group.floor
    ranks = [[place, place] for place in range(1, len(rows) + 1)]
    if floor is None:
        return ranks
    logs = [math.log(row.numbers.step_seconds_median) for row in rows]
    shares = [margin_shares(floor, row.runs) for row in rows]
    for slower in range(len(rows)):
        for faster in range(slower):
            margin = max(map(operator.add, shares[slower], shares[faster]))
            if abs(logs[slower] - logs[faster]) <= math.sqrt(margin):
                ranks[slower][0] -= 1
                ranks[faster][1] += 1
    return ranks


def _against(row: Row, reference: Row, place: int, ranks: Sequence[int]) -> Versus:
    """Return a row's relation to the reference."""
    is_reference, pace = row is reference, lookup.pace(row, reference)
    found = [parity.distances(result, reference.first) for result in row.results]
    far = {
        measure: max((d[measure] for d in found if measure in d), default=None)
        for measure in ("loss", "norm", "update")
    }
    verdict = _verdict(row, reference)
    return Versus(
        place=place,
        rank=ranks[0],
        last_rank=ranks[1],
        is_reference=is_reference,
        speed_ratio=pace.ratio,
        speed_differs=None if is_reference else pace.differs,
        speed_same=not is_reference and pace.same,
        need_change_fraction=lookup.need_change(row, reference),
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


def _name_missing(report: Report) -> None:
    """Name the requested reference in each group in which another row replaces it.

    It did not finish or is missing, and the report must state this. A group of other work has its
    own reference: it names the recipe only if that was tried on its work.
    """
    wanted = report.suite.reference
    if not wanted:
        return
    measured = any(_named(group.rows, wanted) for group in report.groups)
    tried = [u for u in report.unfinished if same_recipe(u.result.spec.recipe, wanted)]
    for group in report.groups:
        own = group.reference
        here = [u for u in tried if work_of(u.result.spec) == work_of(own.spec)]
        if not same_recipe(own.spec.recipe, wanted) and (here or not measured):
            group.asked = wanted
            group.asked_ended = next((u.status.value for u in here or tried), "")
            own.notes.append(f"in place of {wanted}")

"""The ``scale`` analysis: weak and strong scaling, measured."""

from __future__ import annotations

import math

from harness.prediction import Sent
from harness.report.data import lookup
from harness.report.data.grid import Grid, text_grid
from harness.report.data.rows import Report, Row
from harness.report.figures import numbers, units
from harness.report.figures.numbers import REGIMES, Line, Point
from harness.report.figures.predicted import relative_error
from strategies import parse

KEPT = {"weak": "the samples of a process stay", "strong": "the samples of a step stay"}
ON_CPU = (
    "All processes share the same {cores} cores, whatever their number, so nothing here can show a "
    "speed-up: {kept} of one process's samples a second is what is left when the same cores are "
    "cut among several processes that communicate through memory. More processes than cores take "
    "turns: their speed says nothing, and is not told. None seen: the noise floor explains it."
)
ON_GPU = (
    "{kept}: samples a second of a GPU against plain training on one of the same recipe, which "
    "does nothing for the sake of others, or where that was not measured against the recipe's own "
    "fewest GPUs, whose number is behind it. None seen: the noise floor explains the difference."
)
MEMORY = (
    "Peak: the traced tensors of a step on the predicted rank, beside the prediction. "
    "Sent: bytes that this rank sends in a step if each collective is a ring, from a "
    "watched step, beside the prediction. A dash: not all collectives are among all "
    "ranks, and the record does not have their groups."
)


def tables(report: Report) -> list[Grid]:
    """Return a table of measured rows for each regime."""
    measured = [_measured(report, regime) for regime in REGIMES]
    return [grid for grid in measured if grid.lines]


def measured_lines(report: Report, regime: str) -> list[Line]:
    """Return the lines of measured rows, in the suite's order."""
    rows = [row for group in report.groups for row in group.rows]
    order = {recipe: place for place, recipe in enumerate(report.suite.order)}
    ordered = sorted(rows, key=lambda row: order.get(row.spec.recipe, len(order)))
    return numbers.lines([_point(row) for row in ordered], regime)


def shared(report: Report) -> bool:
    """Return True if the measured processes share a machine's cores."""
    return bool(report.groups) and report.groups[0].meter != "cuda"


def bytes_of(point: Point) -> int | None:
    """Return a point's memory: a measured step's peak."""
    return point.row.numbers.peak_bytes


def _point(row: Row) -> Point:
    spec, cores = row.spec, cores_of(row)
    told = cores is None or spec.processes <= cores
    seconds = row.numbers.step_seconds_median if told else None
    batch = {"count": spec.processes, "batch": spec.global_batch}
    return Point(recipe=spec.recipe, **batch, seconds=seconds, row=row)


def cores_of(row: Row) -> int | None:
    """Return the cores that a row's processes share; None on GPUs, which each have their own."""
    if row.first.meter == "cuda":
        return None
    return int(row.first.environment.get("cores") or 1)


def _measured(report: Report, regime: str) -> Grid:
    found, cores = measured_lines(report, regime), shared(report)
    head = "Kept %" if cores else "Efficiency %"
    kinds = {"Recipe": "text", "Processes": "count", "Batch a process": "text"}
    kinds |= {"Samples/s": "rate", head: "text", "Peak MiB": "mib", "Predicted MiB": "mib"}
    kinds |= {"Error %": "error", "Sent MiB": "mib", "Sent, predicted MiB": "mib"}
    lines = [_values(*pair, cores) for pair in numbers.told_once(found)]
    title = f"{regime.capitalize()} scaling, measured: {KEPT[regime]}"
    return _grid(f"scale_{regime}", title, kinds, lines, _note(report, cores, head))


def _grid(
    key: str, title: str, kinds: dict[str, str], lines: list[list[object]], note: str
) -> Grid:
    """Return a table of values, each column with decimals of its own."""
    columns = zip(kinds.values(), zip(*lines, strict=True), strict=False)
    cells = zip(*(units.column(kind, of) for kind, of in columns), strict=True)
    return text_grid(key, title, kinds, [list(line) for line in cells], note)


def _values(line: Line, point: Point, cores: bool) -> list[object]:
    row, beside = point.row, point.row.predicted
    wanted = beside.step_predicted if beside else None
    peak = beside.step_measured if wanted else row.numbers.peak_bytes
    share = point.batch / point.count
    return [
        *(point.recipe, point.count, f"{share:g}", point.rate, _kept(point, line, cores)),
        *(peak, wanted, relative_error(wanted, peak)),
        *(sent_of(row), _total(beside.sent) if beside else None),
    ]


def _kept(point: Point, line: Line, cores: bool) -> str:
    found = numbers.efficiency(point, line.base, cores) if line.base else None
    if found is None:
        return units.NONE
    margin = lookup.margin_fraction(point.row, line.base.row)
    explained = margin is not None and abs(math.log(found[1])) <= math.log1p(margin)
    if point is not line.base and explained:
        return lookup.SAME
    behind = "" if line.base.count == 1 else f" (of {line.base.count})"
    return f"{units.one('percent', found[1])}{behind}"


def sent_of(row: Row) -> int | None:
    """Return the bytes that a rank sent in a watched step; None if unknown."""
    recipe, ranks = parse(row.spec.recipe), row.spec.processes
    layout = recipe.sharding.engine(row.spec.device).chosen(recipe.sharding.choices).layout(ranks)
    several = layout.replicate > 1 and layout.shard > 1
    if ranks == 1 or several or recipe.together > 1 or layout.pipeline > 1:
        return None
    facts = row.first.evidence.get(recipe.sharding.name) or {}
    return numbers.ring_bytes(facts["sent_bytes"], ranks) if facts.get("sent_bytes") else None


def _total(sent: Sent | None) -> int | None:
    return sent.within + sent.across or None if sent else None


def _note(report: Report, cores: bool, head: str) -> str:
    found = {cores_of(row) for group in report.groups for row in group.rows} - {None}
    how = ON_CPU.format(cores=" or ".join(map(str, sorted(found))), kept=head) if cores else ""
    return f"{how or ON_GPU.format(kept=head)} {MEMORY}"

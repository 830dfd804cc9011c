"""The ``scale`` analysis: weak and strong scaling, measured here and predicted for other GPUs.

A stored forecast is read (``harness.prediction``). ``./run.sh plan --scale`` makes it and
prints the same tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.prediction import Forecast, ForecastRow, Sent
from harness.report.data import lookup
from harness.report.data.grid import Grid, text_grid
from harness.report.data.rows import Report, Row
from harness.report.figures import numbers, units
from harness.report.figures.numbers import REGIMES, Line, Point
from harness.report.figures.predicted import relative_error
from strategies import parse

HALF = 0.5
"""Share of a step in exposed communication, or of efficiency, beyond which more GPUs do not pay."""
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
    """Return a table of measured rows for each regime, then the predicted ones, if any."""
    measured = [_measured(report, regime) for regime in REGIMES]
    kept = [grid for grid in measured if grid.lines]
    forecast = report.suite.forecast
    return kept + (predicted(forecast) if forecast else [])


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
    """Return a point's memory: a measured step's peak, or the predicted need of a GPU."""
    row = point.row
    return row.need_bytes if isinstance(row, ForecastRow) else row.numbers.peak_bytes


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


def foretold_lines(forecast: Forecast, regime: str) -> list[Line]:
    """Return the lines of predicted rows, in the order of the request."""
    return numbers.lines([_forecast_point(row) for row in forecast.rows], regime)


def _forecast_point(row: ForecastRow) -> Point:
    ends = (row.slow_links_seconds, row.slow_card_seconds)
    return Point(
        recipe=row.asked or row.spec.recipe,
        count=row.spec.processes,
        batch=row.spec.global_batch,
        seconds=row.step_seconds if row.fits else None,
        ends=ends if row.fits and None not in ends else (),
        row=row,
    )


def predicted(forecast: Forecast) -> list[Grid]:
    """Return a table for each predicted regime, and the end of each recipe's scaling."""
    lines_of = {regime: foretold_lines(forecast, regime) for regime in REGIMES}
    grids = [_foretold(forecast, regime, found) for regime, found in lines_of.items() if found]
    return [*grids, _ends(forecast, lines_of)] if grids else []


def _foretold(forecast: Forecast, regime: str, found: Sequence[Line]) -> Grid:
    kinds = {"Recipe": "text", "GPUs": "count", "Batch a GPU": "text", "": "flag"}
    kinds |= {"Needs GiB": "gib", "Step ms": "text", "Img/s a GPU": "rate", "Efficiency %": "text"}
    kinds |= {"In node GiB": "gib", "Between GiB": "gib", "Exposed %": "percent"}
    lines = [_foretold_values(*pair) for pair in numbers.told_once(found)]
    title = f"{regime.capitalize()} scaling, predicted for {forecast.model} on {forecast.gpu}"
    title += f": {KEPT[regime]}"
    return _grid(f"foretold_{regime}", title, kinds, lines, foretold_note(forecast))


def _foretold_values(line: Line, point: Point) -> list[object]:
    row: ForecastRow = point.row
    step, pace = units.NONE, None
    if row.step_seconds is not None:
        step = f"{row.step_seconds * 1e3:.0f}"
        if row.low_seconds is not None:
            step += f" ({row.low_seconds * 1e3:.0f}-{row.high_seconds * 1e3:.0f})"
        pace = point.batch / row.step_seconds / point.count
    share = f"{point.batch / point.count:g}"
    return [
        *(point.recipe, point.count, share, row.verdict, row.need_bytes, step, pace),
        *(_between(point, line), row.within_bytes, row.across_bytes, exposed(row)),
    ]


def _between(point: Point, line: Line) -> str:
    """Return an efficiency with the range of its uncertainty."""
    found = numbers.efficiency(point, line.base) if line.base else None
    if found is None:
        return units.NONE
    if point is line.base:
        return "base"
    least, told, most = (f"{100 * share:.0f}" for share in found)
    return f"{told} ({least}-{most})"


def exposed(row: ForecastRow) -> float | None:
    """Return the share of a step in communication that nothing hides."""
    return row.exposed_seconds / row.step_seconds if row.step_seconds else None


def foretold_note(forecast: Forecast) -> str:
    """Return the meaning of the columns, and what no prediction includes."""
    return (
        f"Nothing was run. Nodes of {forecast.node} {forecast.gpu} "
        f"({forecast.gpu_bytes / units.GIB:.1f} GiB each). Needs: memory of one GPU, on "
        "which the noise of the whole batch is drawn, as on every rank here. Efficiency: "
        "images/s of a GPU relative to plain training on one GPU. If that does not fit: "
        "relative to the recipe on the fewest GPUs on which it fits (base). It exceeds "
        "100 % if an engine steps a share of the weights only, or casts them less often. "
        "Brackets: the range from a quick card on slow links to a slow card on quick "
        "ones, by the plan's uncertainty. In node and Between: bytes that a GPU sends in "
        "a step if each collective is a ring; one that spans nodes counts as sent "
        "between them. Exposed: the share of a step in which communication is not "
        "hidden. Not included: the longer start of collectives among many ranks, slower "
        "ranks, and links that jobs share. Steps on many nodes take longer for these "
        f"reasons. {forecast.assumed}"
    )


def _ends(forecast: Forecast, lines_of: dict[str, list[Line]]) -> Grid:
    kinds = {"Recipe": "text", "Scaling": "text", "Pays up to": "text", "Then": "text"}
    cells = [
        [line.recipe, regime, *until(line)] for regime, found in lines_of.items() for line in found
    ]
    note = (
        "Among the requested numbers of GPUs. More GPUs stop to pay if one of these "
        f"holds. A GPU does less than {HALF:.0%} of its work at the base. Exposed "
        f"communication takes more than {HALF:.0%} of a step. The memory no longer "
        "suffices. A batch cannot be divided further (strong)."
    )
    title = (
        f"Number of GPUs from which more do not pay, predicted for {forecast.model} on "
        f"{forecast.gpu}"
    )
    return text_grid("scale_ends", title, kinds, cells, note)


def until(line: Line) -> tuple[str, str]:
    """Return the most GPUs up to which a line pays (``-``: none), and the reason for the end."""
    last = units.NONE
    for point in line.points:
        why = _stops(point, line)
        if why and (last != units.NONE or point is line.points[-1]):
            return last, f"at {point.count}: {why}"
        last = last if why else str(point.count)
    end = line.points[-1]
    return last, "one sample a GPU: nothing to divide" if end.batch == end.count else "no end seen"


def _stops(point: Point, line: Line) -> str:
    """Return why that many GPUs do not pay; empty if they do."""
    row: ForecastRow = point.row
    if row.verdict == "no":
        return "does not fit"
    if not row.fits:
        return row.reason or row.verdict
    if exposed(row) > HALF:
        return f"{exposed(row):.0%} of a step is exposed communication"
    found = numbers.efficiency(point, line.base) if line.base else None
    if found is None or found[1] >= HALF:
        return ""
    return f"a GPU does {found[1]:.0%} of what it did at {line.base.count}"

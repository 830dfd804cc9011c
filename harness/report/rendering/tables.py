"""The tables of a page: their columns, titles, rows and marks. Other numbers are in the CSV."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from harness.report.data import effects, lookup
from harness.report.data.answers import fastest_that_fits
from harness.report.data.grid import Column, Grid, tabulate
from harness.report.data.rows import Group, Row, Unfinished
from harness.report.figures import derive, parity, units
from harness.report.figures.units import ALL_CATEGORIES, CATEGORIES, title
from harness.report.rendering.explanations import NOTES
from harness.result import is_unplaced

Cell = Callable[[Row], Any]
"""Returns the value of a row in one column."""
NOTHING = "nothing measured"
SECOND = 1.02
"""Ratio of the second step's peak to the first's from which a note warns about one-step peaks."""


def number(name: str) -> Cell:
    """Return the function from a row to a field of its ``Numbers``."""
    return lambda row: getattr(row.numbers, name)


def versus(name: str) -> Cell:
    """Return the function from a row to a field of its comparison; None for the reference."""
    return lambda row: None if row.versus.is_reference else getattr(row.versus, name)


def _predicted(name: str) -> Cell:
    return lambda row: getattr(row.predicted, name)


# ---- cells of the ranking ----


def _speed_ratio(row: Row) -> Any:
    """Return the ratio of speeds, "same", or the interval that the noise leaves open."""
    if row.versus.speed_same:
        return lookup.SAME
    found = row.versus.speed_ratio
    if row.versus.speed_differs is not False:
        return versus("speed_ratio")(row)
    width = 1 + row.versus.speed_margin_fraction
    return f"{found / width:.2f}-{found * width:.2f}"


def _rank(row: Row) -> Any:
    """Return the ranks that the noise leaves to a row: "3", or "1-4"."""
    first, last = row.versus.rank, row.versus.last_rank
    return first if first == last else f"{first}-{last}"


def _verdict(row: Row) -> str:
    """Return the verdict, with the distance of losses or samples if the row is not equal."""
    word, far = row.versus.parity, row.versus.loss_distance
    if row.drawn is not None:
        far = row.drawn.away
    told = word in ("by design", *parity.WRONG) and far is not None
    return f"{word} {units.one('distance', far)}" if told else word


def _disturbed(row: Row) -> str | None:
    marked = row.numbers.disturbed_steps
    return None if marked is None else f"{marked} of {row.numbers.timed_steps}"


def flags(row: Row) -> str:
    """Return the notes that a reader needs before a row's numbers."""
    words = ["front"] if row.versus.front else []
    words += ["noisy"] if row.numbers.noisy else []
    words += [f"{_disturbed(row)} steps disturbed"] if row.numbers.disturbed_steps else []
    words += ["network paused?"] if any(map(derive.paused_steps, row.results)) else []
    words += [row.versus.parity] if row.versus.wrong else []
    words += [kind] if (kind := parity.computation(row.first)) else []
    return ", ".join([*words, *_of_the_peak(row), *row.notes])


def _of_the_peak(row: Row) -> list[str]:
    """Return why a row has no peak, or one that includes host memory.

    On a GPU, return the second step's increase over the first, which starts without optimizer
    state.
    """
    found = row.numbers
    if row.first.meter == "cuda":
        first, steady = found.first_step_metered_bytes, found.steady_metered_bytes
        if row.drawn or not first or not steady or steady < SECOND * first:
            return []
        return [f"second step +{100 * (steady / first - 1):.0f} % memory"]
    if found.peak_bytes is None:
        return [f"not traced: resident {units.gib(found.resident_peak_bytes)}"]
    return ["places unknown"] if is_unplaced(found.placed_by) else []


def _processes_and_flags(usual: int) -> Cell:
    """Return ``flags`` with the number of processes of rows that have another than ``usual``."""

    def noted(row: Row) -> str:
        count = row.spec.processes
        own = [] if count == usual else [f"{count} process{'es' * (count > 1)}"]
        return ", ".join([*own, *filter(None, [flags(row)])])

    return noted


RECIPE = Column("Recipe", lambda r: r.label)
NOTED = Column("Notes", flags, "flag")
RANKING = (
    Column("#", _rank, "count"),
    RECIPE,
    Column("Samples/s", number("samples_per_second"), "rate"),
    Column("x ref", _speed_ratio, "ratio"),
    Column("Peak GiB", number("peak_bytes"), "gib"),
    Column("Needs GiB", lambda r: r.numbers.need_bytes if r.first.meter == "cuda" else None, "gib"),
    Column("vs ref %", versus("need_change_fraction"), "change"),
    Column("Loss vs ref", _verdict),
    NOTED,
)
"""At most eight columns are shown: without a GPU there is no need beside the peak, on a GPU the
need takes the peak's place."""
EFFECTS = (
    Column("Adding", lambda e: e.words),
    Column("to", lambda e: e.base.label),
    Column("Samples/s x", lambda e: lookup.ratio(e.row, e.base), "ratio"),
    Column("Memory %", lambda e: e.need_change_fraction, "change"),
)
PHASES = (
    RECIPE,
    *(Column(f"{title(p)} GiB", number(f"{p}_metered_bytes"), "gib") for p in derive.PHASES),
)


def _traced_peak(row: Row) -> int | None:
    """Return the bytes of all categories together; without a GPU that is the peak."""
    sizes = [getattr(row.numbers, f"{name}_bytes") for name in ALL_CATEGORIES]
    return None if None in sizes else sum(sizes)


SPLIT = (
    RECIPE,
    Column("Traced peak GiB", _traced_peak, "gib"),
    *(Column(f"{title(name)} GiB", number(f"{name}_bytes"), "gib") for name in CATEGORIES),
    Column("Other models GiB", lambda row: row.numbers.other_models_bytes or None, "gib"),
    Column("On host GiB", number("hosted_bytes"), "gib"),
    Column("Reserved GiB", number("reserved_peak_bytes"), "gib"),
    Column("Host, all GiB", number("host_total_bytes"), "gib"),
    Column("NVMe GiB", lambda r: r.numbers.nvme_bytes or None, "gib"),
)


def _compiled(fact: str) -> Cell:
    return lambda row: row.first.evidence.get("compile", {}).get(fact)


TIME = (
    RECIPE,
    Column("Step ms", number("step_seconds_median"), "ms"),
    Column("p10 ms", number("step_seconds_p10"), "ms"),
    Column("p90 ms", number("step_seconds_p90"), "ms"),
    Column("Steps", number("timed_steps"), "count"),
    Column("Disturbed", _disturbed),
    Column("Repeats", number("repeats"), "count"),
    Column("TFLOP/s a device", number("flops_per_second_device"), "tera"),
    Column("MFU %", number("mfu_fraction"), "percent"),
    Column("Set-up s", number("setup_seconds"), "seconds"),
    Column("Warm-up s", number("warmup_seconds"), "seconds"),
    Column("Compile s", _compiled("compile_seconds"), "seconds"),
    Column("Graph breaks", _compiled("graph_breaks"), "count"),
    Column("Whole run s", number("wall_seconds"), "seconds"),
)


PARITY = (
    RECIPE,
    Column("Promised", lambda r: r.first.parity),
    Column("Products", number("precision")),
    Column("Loss distance", versus("loss_distance"), "distance"),
    Column("Gradient norm distance", versus("grad_norm_distance"), "distance"),
    Column("Update distance", versus("update_distance"), "distance"),
    Column("Samples' distance", lambda r: r.drawn and r.drawn.away, "distance"),
    Column("Verdict", lambda r: r.versus.parity),
    Column("Differs in", lambda r: r.versus.differs_in or None),
    Column("First loss", lambda r: r.first.losses[0] if r.first.losses else None, "loss"),
    Column("Last loss", lambda r: r.first.losses[-1] if r.first.losses else None, "loss"),
)


def _calibrated(name: str) -> Cell:
    return lambda row: getattr(row.calibrated, name, None)


PREDICTED = (
    RECIPE,
    Column("By", _predicted("method")),
    Column("Step, predicted GiB", _predicted("step_predicted"), "gib"),
    Column("Step, traced GiB", _predicted("step_measured"), "gib"),
    Column("Step error %", _predicted("step_error"), "error"),
    Column("Run, predicted GiB", _predicted("run_predicted"), "gib"),
    Column("Run, measured GiB", _predicted("run_measured"), "gib"),
    Column("Run error %", _predicted("run_error"), "error"),
    Column("Step, predicted ms", _calibrated("predicted_seconds"), "ms"),
    Column("Step, measured ms", _calibrated("measured_seconds"), "ms"),
    Column("Time error %", _calibrated("error"), "error"),
    Column("Why no trace", _predicted("reason")),
)


def _ended_in(unfinished: Unfinished) -> str | None:
    """Return where a run ended: the phase, and the step within it."""
    phase, step = unfinished.result.phase, unfinished.result.step
    return phase if phase is None or step is None else f"{phase}, step {step}"


UNFINISHED = (
    Column("Recipe", lambda u: u.label),
    Column("Status", lambda u: u.status.value),
    Column("In", _ended_in),
    Column("So far GiB", lambda u: u.so_far_bytes, "gib"),
    Column("Predicted need GiB", lambda u: u.predicted_fit and u.predicted_fit.need_bytes, "gib"),
    Column("Predicted to fit", lambda u: u.predicted_fit and ("no", "yes")[u.predicted_fit.fits]),
    Column("Why", lambda u: u.reason),
    Column("Way out", lambda u: u.result.way_out),
)


# ---- tables ----


def ranking(group: Group) -> Grid:
    """Return the rows of a group, fastest first, with their differences from the reference."""
    gone = "Peak GiB" if group.meter == "cuda" else "Needs GiB"
    columns = [column for column in RANKING if column.head != gone]
    if len({row.spec.processes for row in group.rows}) > 1:
        noted = _processes_and_flags(group.reference.spec.processes)
        columns[-1] = dataclasses.replace(NOTED, take=noted)
    if group.draws:
        at = next(i for i, column in enumerate(columns) if column.head == "Loss vs ref")
        columns[at] = Column("Samples vs ref", _verdict)
    return _table("ranking", "Ranking", columns, group.rows)


def group_grids(group: Group) -> list[Grid]:
    """Return the tables of a group below its ranking, without empty ones."""
    rows = group.rows
    meter = "Live tensors" if group.meter == "cuda" else "Resident mark"
    alike = "Same samples?" if group.draws else "Same computation?"
    grids = [
        _table("effects", "Effect of each part", EFFECTS, effects.effects(group)),
        _table("phases", f"{meter} of each phase", PHASES, rows),
        _table("split", "Memory at the peak", SPLIT, rows),
        _table("time", "Time", TIME, rows),
        _table("parity", alike, PARITY, rows),
        _table("predicted", "Predicted and measured", PREDICTED, [r for r in rows if r.predicted]),
    ]
    return [grid for grid in grids if grid.lines and len(grid.heads) > 1]


def unfinished_grid(unfinished: Sequence[Unfinished]) -> Grid:
    """Return the planned rows without a number to rank."""
    return _table("unfinished", "Did not finish", UNFINISHED, unfinished)


def fits(group: Group) -> Grid:
    """Return each memory size's fastest row, with its samples/s and need."""
    columns = (
        Column("With GiB a device", lambda f: f.sizes),
        Column("Fastest that fits", lambda f: f"{f.row.label}{f.others}" if f.row else NOTHING),
        Column("Samples/s", lambda f: f.row and f.row.numbers.samples_per_second, "rate"),
        Column("Needs GiB", lambda f: f.row and f.row.numbers.need_bytes, "gib"),
    )
    return tabulate("fits", "What fits", columns, fastest_that_fits(group))


def _table(key: str, title: str, columns: Sequence[Column], rows: Sequence[Any]) -> Grid:
    """Return ``tabulate`` with the note of this table; ranked rows are marked."""
    marks = [_marks(row) if isinstance(row, Row) else () for row in rows]
    return tabulate(key, title, columns, rows, marks=marks, note=NOTES.get(key, ""))


def _marks(row: Row) -> tuple[str, ...]:
    """Return a row's marks, as class names of the style sheet."""
    holds = {
        "reference": row.versus.is_reference,
        "front": row.versus.front,
        "noisy": row.numbers.noisy,
        "alarm": row.versus.wrong,
    }
    return tuple(word for word, it_does in holds.items() if it_does)

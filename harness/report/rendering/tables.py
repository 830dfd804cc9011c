"""The tables of a page: their columns, titles, rows, marks and notes. Other numbers are in the
CSV.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from harness.report.data import answers, effects, lookup
from harness.report.data.grid import Column, Grid, tabulate
from harness.report.data.rows import Group, Row, Unfinished
from harness.report.figures import derive, parity, units
from harness.report.figures.units import ALL_CATEGORIES, CATEGORIES, title
from harness.result import is_unplaced

Cell = Callable[[Row], Any]
"""Returns the value of a row in one column."""
SECOND = 1.02
"""Ratio of the second step's peak to the first's from which a note warns about one-step peaks."""


def field(path: str) -> Cell:
    """Return the function from a row to the field at a path, such as ``numbers.need_bytes``.

    It is None if a part of the path is missing, and for the reference's comparison with itself.
    """

    def value(row: Row) -> Any:
        if path.startswith("versus.") and row.versus.is_reference:
            return None
        return functools.reduce(lambda part, name: getattr(part, name, None), path.split("."), row)

    return value


def _fits(thing: Any) -> str | None:
    return thing.predicted.fit and ("no", "yes")[thing.predicted.fit.fits]


# ---- cells of the ranking ----


def _rank(row: Row) -> Any:
    """Return the ranks that the noise leaves to a row: "3", or "1-4"."""
    first, last = row.versus.rank, row.versus.last_rank
    return first if first == last else f"{first}-{last}"


def _verdict(row: Row) -> str:
    """Return the verdict, with the distance of losses or samples if the row is not equal."""
    word, far = row.versus.parity, row.versus.loss_distance
    if row.samples_distance is not None:
        far = row.samples_distance
    has_distance = word in ("by design", *parity.WRONG) and far is not None
    return f"{word} {units.one('distance', far)}" if has_distance else word


def _disturbed(row: Row) -> str | None:
    marked = row.numbers.disturbed_steps
    return None if marked is None else f"{marked} of {row.numbers.timed_steps}"


def flags(row: Row) -> str:
    """Return the notes that a reader needs before a row's numbers."""
    found, first = row.numbers, row.first
    holds = {
        "front": row.versus.front,
        "noisy": found.noisy,
        f"{_disturbed(row)} steps disturbed": found.disturbed_steps,
        "network paused?": any(map(derive.paused_steps, row.results)),
        row.versus.parity: row.versus.wrong,
        parity.computation(first): parity.computation(first),
    }
    words = [word for word, it_does in holds.items() if it_does]
    if first.meter == "cuda":
        begun, steady = (found.phase_bytes.get(phase) for phase in ("first_step", "steady"))
        # The first step starts without optimizer state.
        if begun and steady and not row.first.drawn and steady >= SECOND * begun:
            words.append(f"second step +{100 * (steady / begun - 1):.0f} % memory")
    elif found.peak_bytes is None:
        words.append(f"not traced: resident {units.gib(found.resident_peak_bytes)}")
    elif is_unplaced(found.placed_by):
        words.append("places unknown")
    return ", ".join([*words, *row.notes])


# ---- tables ----


RECIPE = Column("Recipe", lambda r: r.label)
EFFECTS = (
    Column("Adding", lambda e: e.part + (f" (in place of {e.replaced})" if e.replaced else "")),
    Column("to", lambda e: e.base.label),
    Column("Samples/s x", lambda e: lookup.pace(e.row, e.base).shown, "ratio"),
    Column("Memory %", lambda e: lookup.need_change(e.row, e.base), "change"),
)
EFFECTS_NOTE = (
    "Two rows that differ in one part only, and its effect on speed and on the memory that rows "
    "are compared by. An interval: the noise does not tell the two speeds apart."
)


def _traced_peak(row: Row) -> int | None:
    """Return the bytes of all categories together; without a GPU that is the peak."""
    sizes = [getattr(row.numbers, f"{name}_bytes") for name in ALL_CATEGORIES]
    return None if None in sizes else sum(sizes)


SPLIT = (
    RECIPE,
    Column("Traced peak GiB", _traced_peak, "gib"),
    *(Column(f"{title(name)} GiB", field(f"numbers.{name}_bytes"), "gib") for name in CATEGORIES),
    Column("Other models GiB", lambda row: row.numbers.other_models_bytes or None, "gib"),
    Column("On host GiB", field("numbers.hosted_bytes"), "gib"),
    Column("NVMe GiB", lambda r: r.numbers.nvme_bytes or None, "gib"),
)
SPLIT_NOTE = (
    "Alive at the traced peak of one step on the fullest rank. EMA: the average, and everything "
    "else that a strategy keeps beside the model (masks, gradients not sent yet). Workspace: "
    "temporaries, buckets, kernel scratch. Without a GPU the traced peak is the Peak."
)


def _compiled(fact: str) -> Cell:
    return lambda row: row.first.evidence.get("compile", {}).get(fact)


TIME = (
    RECIPE,
    Column("Step ms", field("numbers.step_seconds_median"), "ms"),
    Column("p10 ms", field("numbers.step_seconds_p10"), "ms"),
    Column("p90 ms", field("numbers.step_seconds_p90"), "ms"),
    Column("Steps", field("numbers.timed_steps"), "count"),
    Column("Disturbed", _disturbed),
    Column("TFLOP/s a device", field("numbers.flops_per_second_device"), "tera"),
    Column("MFU %", field("numbers.mfu_fraction"), "percent"),
    Column("Set-up s", field("numbers.setup_seconds"), "seconds"),
    Column("Warm-up s", field("numbers.warmup_seconds"), "seconds"),
    Column("Compile s", _compiled("compile_seconds"), "seconds"),
    Column("Graph breaks", _compiled("graph_breaks"), "count"),
)
TIME_NOTE = (
    "Each step counts as its slowest rank's. Disturbed: other work held 10 % of the cores or more, "
    "and less than 25 % were idle; or a step 10 % longer than the row's fastest, with a smaller "
    "share of the cores or far more forced switches. Set-up: import to prepared. Compile: time of "
    "torch.compile within the warm-up, from an empty cache."
)
PARITY = (
    RECIPE,
    Column("Promised", lambda r: r.first.parity),
    Column("Products", field("numbers.precision")),
    Column("Loss distance", field("versus.loss_distance"), "distance"),
    Column("Gradient norm distance", field("versus.grad_norm_distance"), "distance"),
    Column("Update distance", field("versus.update_distance"), "distance"),
    Column("Samples' distance", lambda r: r.samples_distance, "distance"),
    Column("Verdict", lambda r: r.versus.parity),
    Column("Differs in", lambda r: r.versus.differs_in or None),
    Column("Last loss", lambda r: r.first.losses[-1] if r.first.losses else None, "loss"),
)
_TIGHT, _WIDE = (
    ", ".join(f"{getattr(limits, measure):.0e}" for measure in parity.MEASURES).replace("e-0", "e-")
    for limits in (parity.FLOAT32, parity.WIDE)
)
PARITY_NOTE = (
    "Distance: the largest step's |a - b| / |b| to the reference row. For updates it is that of "
    "the block that is furthest away, by a few signed sums of the changes. A row that must not "
    "change the computation DIFFERS beyond what rounding explains. Limits of a loss, a gradient "
    f"norm, a moment, an update and an average: {_TIGHT} in float32 on CPUs in the first "
    f"{parity.EARLY_STEPS} steps; on GPUs {parity.SLACK:g} times the distance between repetitions "
    f"of the reference; otherwise {_WIDE}."
)
PREDICTED = (
    RECIPE,
    Column("By", field("predicted.memory.method")),
    Column("Step, predicted GiB", field("predicted.memory.step_predicted"), "gib"),
    Column("Step, traced GiB", field("predicted.memory.step_measured"), "gib"),
    Column("Step error %", field("predicted.memory.step_error"), "error"),
    Column("Run, predicted GiB", field("predicted.memory.run_predicted"), "gib"),
    Column("Run, measured GiB", field("predicted.memory.run_measured"), "gib"),
    Column("Run error %", field("predicted.memory.run_error"), "error"),
    Column("Predicted to fit", _fits),
    Column("Step, predicted ms", field("predicted.times.predicted_seconds"), "ms"),
    Column("Step, measured ms", field("predicted.times.measured_seconds"), "ms"),
    Column("Time error %", field("predicted.times.error"), "error"),
    Column("Why no trace", field("predicted.memory.reason")),
)
PREDICTED_NOTE = (
    "Predicted by tracing the same set-up and step without memory, on this machine, in a separate "
    "process. Step: live tensors at the peak of one later step, against the run's own trace (rank "
    "0), which is not an independent measure. Run: the whole run with set-up, against an "
    "independent measure: the allocator's highest phase on a GPU, else Resident."
)
UNFINISHED = (
    Column("Recipe", lambda u: u.label),
    Column("Status", lambda u: u.status.value),
    Column("In", lambda u: ", step ".join(
        str(part) for part in (u.result.phase, u.result.step) if part is not None
    ) or None),
    Column("So far GiB", lambda u: u.so_far_bytes, "gib"),
    Column("Predicted need GiB", field("predicted.fit.need_bytes"), "gib"),
    Column("Predicted to fit", _fits),
    Column("Why", lambda u: u.reason),
    Column("Way out", lambda u: u.result.way_out),
)  # fmt: skip
RANKING_NOTE = (
    "#: rank by speed; a range if the noise leaves several. Samples/s: global batch over the "
    "median step, of the whole job. x ref: to the reference; an interval if the noise does not "
    "tell them apart, 'same' if all of it lies within the noise floor. Peak: live tensors on the "
    "fullest device at the fullest instant of a step. Needs (GPU): free memory for the whole run. "
    "vs ref %: change of Needs, without a GPU of Peak. Loss vs ref: 'equal' within rounding; 'by "
    "design' if the recipe changes the computation. Front: no other is both faster and smaller. "
    "Noisy: (p90 - p10) / median above 20 %, or medians of repetitions more than 10 % apart."
)


def ranking(group: Group) -> Grid:
    """Return the rows of a group, fastest first, with their differences from the reference.

    At most eight columns: without a GPU there is no need beside the peak, on a GPU the need takes
    the peak's place.
    """
    reference, several = group.reference, len({row.spec.processes for row in group.rows}) > 1

    def noted(row: Row) -> str:
        count = row.spec.processes
        own = f"{count} process{'es' * (count > 1)}"
        other = several and count != reference.spec.processes
        return ", ".join(filter(None, (own * other, flags(row))))

    def ratio(row: Row) -> Any:
        return None if row.versus.is_reference else lookup.pace(row, reference).shown

    size = "Needs GiB" if group.meter == "cuda" else "Peak GiB"
    columns = (
        Column("#", _rank, "count"),
        RECIPE,
        Column("Samples/s", field("numbers.samples_per_second"), "rate"),
        Column("x ref", ratio, "ratio"),
        Column(size, field("numbers.need_bytes"), "gib"),
        Column("vs ref %", field("versus.need_change_fraction"), "change"),
        Column("Samples vs ref" if group.draws else "Loss vs ref", _verdict),
        Column("Notes", noted, "flag"),
    )
    return _table("ranking", "Ranking", columns, group.rows, RANKING_NOTE)


def group_grids(group: Group) -> list[Grid]:
    """Return the tables of a group below its ranking, without empty ones."""
    rows, alike = group.rows, "Same samples?" if group.draws else "Same computation?"
    foretold = [row for row in rows if row.predicted.memory]
    grids = [
        tabulate(
            "effects", "Effect of each part", EFFECTS, effects.effects(group), note=EFFECTS_NOTE
        ),
        _table("split", "Memory at the peak", SPLIT, rows, SPLIT_NOTE),
        _table("time", "Time", TIME, rows, TIME_NOTE),
        _table("parity", alike, PARITY, rows, PARITY_NOTE),
        _table("predicted", "Predicted and measured", PREDICTED, foretold, PREDICTED_NOTE),
    ]
    return [grid for grid in grids if grid.lines and len(grid.heads) > 1]


def unfinished_grid(unfinished: Sequence[Unfinished]) -> Grid:
    """Return the planned rows without a number to rank."""
    return tabulate("unfinished", "Did not finish", UNFINISHED, unfinished)


def fits(group: Group) -> Grid:
    """Return the fastest row for each size of memory: the front."""
    columns = (
        Column("From GiB a device", field("numbers.need_bytes"), "gib"),
        Column("Fastest that fits", lambda row: answers.fits(row, group)),
        Column("Samples/s", field("numbers.samples_per_second"), "rate"),
    )
    return tabulate("fits", "What fits", columns, answers.front(group))


def _table(key: str, title: str, columns: Sequence[Column], rows: Sequence[Row], note: str) -> Grid:
    """Return a table of ranked rows; marks are class names of the style sheet."""
    holds = (
        {"reference": v.is_reference, "front": v.front, "alarm": v.wrong}
        for v in (row.versus for row in rows)
    )
    marks = [tuple(word for word, it_does in marked.items() if it_does) for marked in holds]
    return tabulate(key, title, columns, rows, marks=marks, note=note)

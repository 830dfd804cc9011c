"""Tables of a session: ceilings, rows beside their predictions, stations and goals. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness.planner import overhead
from harness.planner.calibrate.parts import Outcome
from harness.planner.calibration.record import (
    Calibration,
    Fitted,
    MeasuredRow,
    fitted,
    labels,
    left_out_errors,
    predicted_seconds,
)
from harness.planner.speed import rates
from harness.planner.speed.roofline import CPU_SPREAD, REACH
from harness.report.data.grid import Grid
from harness.report.figures.units import CATEGORIES, GIB, MIB
from harness.report.rendering.pages import table_lines
from strategies import parse

# ---- goals ----
# Numbers to reach on a GPU, each judged by a measurement. Pure functions.


ONE, SHARDED, RESERVED = 0.03, 0.05, 0.10
PEAK = 0.55
LOW_BYTES, LOW_BATCH, LOW_SPEED = 7 * 2**30, 128, 0.84
"""fast-DiT's published speed of DiT-XL/2 at batch 128 on an A100, in steps per second."""
METER = 0.01
LARGE = "DiT-XL/2"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A goal and its measurement. ``met`` is None if nothing was measured."""

    text: str
    measured: str
    met: bool | None

    @property
    def word(self) -> str:
        return {True: "met", False: "not met", None: "unmeasured"}[self.met]


Found = tuple[str, bool | None]
"""The measurement in words, and whether the goal is met."""


def judged(calibration: Calibration, meter: float | None = None) -> list[Judged]:
    """Judge every goal. On a CPU all are unmeasured."""
    if calibration.device.kind != "cuda":
        why = "no GPU was measured"
        return [Judged(text=text, measured=why, met=None) for text in GOALS]
    found = [(text, *judge(calibration, meter)) for text, judge in GOALS.items()]
    return [Judged(text=text, measured=measured, met=met) for text, measured, met in found]


def _sharded(row: MeasuredRow) -> bool:
    return row.world > 1 or row.processes > 1


def _worst(rows: Sequence[MeasuredRow], name: str, limit: float) -> Found:
    """Return the largest error in a pair of bytes among these rows."""
    errors = {
        row.label: abs(pair[0] / pair[1] - 1)
        for row in rows
        if len(pair := getattr(row, name)) == 2
    }
    if not errors:
        return "no such row was measured and predicted", None
    label = max(errors, key=errors.__getitem__)
    return f"{100 * errors[label]:.1f} % ({label}; {len(errors)} rows)", errors[label] <= limit


def _allocated(found: Calibration, sharded: bool, limit: float) -> Found:
    return _worst([row for row in found.rows if _sharded(row) == sharded], "run", limit)


def _peak(found: Calibration, _: float | None) -> Found:
    """Return the best row of the large model that computes in bfloat16."""
    products = found.ceilings.products.get("bfloat16")
    rows = [
        row
        for row in found.rows
        if row.model == LARGE and row.precision == "bfloat16" and row.flops_per_second
        and not row.world
    ]  # fmt: skip
    if not products or not rows:
        return f"no row of {LARGE} in bfloat16 beside measured products", None
    best = max(rows, key=lambda row: row.flops_per_second / row.processes)
    share = best.flops_per_second / best.processes / products
    return f"{100 * share:.0f} % ({best.label})", share >= PEAK


def _low(found: Calibration, _: float | None) -> Found:
    """Return the fastest row within the bytes; if none is within, the one that needs least."""
    rows = [
        row
        for row in found.rows
        if row.model == LARGE and row.global_batch == LOW_BATCH and not _sharded(row)
        and row.step_seconds and row.needs_bytes
    ]  # fmt: skip
    if not rows:
        return f"no row of {LARGE} at batch {LOW_BATCH}", None
    lean = [row for row in rows if row.needs_bytes <= LOW_BYTES]
    best = min(lean or rows, key=lambda r: r.step_seconds if lean else r.needs_bytes)
    speed = 1 / best.step_seconds
    words = f"{best.needs_bytes / 2**30:.2f} GiB at {speed:.2f} steps/s ({parse(best.recipe).text})"
    return words, bool(lean) and speed >= LOW_SPEED


def _meter(_: Calibration, meter: float | None) -> Found:
    if meter is None:
        return "the meter's cost was not measured", None
    return f"{100 * meter:.2f} % of a step", meter < METER


GOALS: dict[str, Callable[[Calibration, float | None], Found]] = {
    f"allocated memory predicted within {100 * ONE:.0f} % on one GPU": lambda found, _: _allocated(
        found, False, ONE
    ),
    f"allocated memory predicted within {100 * SHARDED:.0f} % sharded": lambda found, _: _allocated(
        found, True, SHARDED
    ),
    f"reserved memory predicted within {100 * RESERVED:.0f} %": lambda found, _: _worst(
        found.rows, "reserved", RESERVED
    ),
    f"{LARGE} in bf16 at {100 * PEAK:.0f} % of the measured matmul peak, best recipe": _peak,
    f"global batch {LOW_BATCH} of {LARGE} on one GPU in at most {LOW_BYTES >> 30} GiB, at "
    f"{LOW_SPEED} steps/s or more": _low,
    "the meter below 1 % of a step": _meter,
}
"""Goal -> its judge by a calibration and the meter's cost (a share of a step, if measured)."""


NONE = "-"
SLOW = 3.0
"""Factor of compute from which a fit is of something else than the card."""


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> Grid:
    """Return a table. A column of more than a number and its unit is text, as is the first."""
    widest = [max((len(c.split()) for c in cells), default=0) for cells in zip(*rows, strict=True)]
    kinds = ["count" if i and words <= 2 else "text" for i, words in enumerate(widest)]
    lines, marks = [list(row) for row in rows], [() for _ in rows]
    return Grid(
        key="calibration", title=title, heads=list(heads), kinds=kinds, lines=lines, marks=marks,
        note=note,
    )  # fmt: skip


def tables(
    calibration: Calibration, outcomes: Sequence[Outcome], goals: Sequence[Judged]
) -> list[Grid]:
    """Return every table of a session that has rows."""
    made = [
        ceilings(calibration),
        attention(calibration),
        times(calibration),
        memory(calibration),
        categories(calibration),
        stations(outcomes),
        table("Goals", ("Goal", "Measured", ""), [(g.text, g.measured, g.word) for g in goals]),
    ]
    return [grid for grid in made if grid.lines]


def lines(title: str, made: Sequence[Grid]) -> str:
    """Return the tables as Markdown."""
    parts = [f"# {title}", ""]
    for grid in made:
        parts += [f"## {grid.title}", "", table_lines(grid), ""]
        parts += [grid.note, ""] if grid.note else []
    return "\n".join(parts)


# ---- ceilings ----


def ceilings(found: Calibration) -> Grid:
    """Return each measured ceiling beside the typical figure that predictions use without it."""
    card, made = rates.of_device(found.device), found.ceilings
    products = {"": made.products, ", a DiT's shapes": made.model_products}
    rows = [
        (f"products {name}{shapes}", f"{rate / 1e12:.3g} TFLOP/s",
         _share(rate, card.peaks.get(name)))
        for shapes, measured in products.items()
        for name, rate in measured.items()
    ]  # fmt: skip
    rows += [
        (f"elementwise, {s.bytes / MIB:.0f} MiB", _speed(s.rate), _share(s.rate, card.bandwidth))
        for s in made.streams
    ]
    rows += [
        (f"copies, {way}", _speed(rate), _share(rate, card.host_bandwidth))
        for way, rate in made.copies.items()
    ]
    if made.host_rate:
        rows.append(("host memory", _speed(made.host_rate), NONE))
    if made.launch_seconds:
        rows.append(("a launch", f"{1e6 * made.launch_seconds:.1f} us", NONE))
    if made.collective:
        c = made.collective
        rows.append(
            (f"all-reduce of {c.ranks}", f"{_speed(c.rate)}, {1e6 * c.seconds:.0f} us",
             _share(c.rate, card.link_bandwidth))
        )  # fmt: skip
    return table("Ceilings", ("What", "Measured", "Of the typical figure"), rows + _standing(found))


def _standing(found: Calibration) -> list[tuple[str, str, str]]:
    typical = overhead.fixed_overhead(rates.of_device(found.device), 2)
    names = {
        "context": "context" if found.device.kind == "cuda" else "interpreter and libraries",
        "libraries": "library workspaces",
        "communication": "communication",
    }
    known = ((name, getattr(found.standing, name)) for name in names)
    return [
        (names[name], f"{size / MIB:.0f} MiB", _share(size, getattr(typical, name)))
        for name, size in known
        if size is not None
    ]


def _share(value: float, typical: float | None) -> str:
    return f"{100 * value / typical:.0f} %" if typical else NONE


def _speed(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"


def attention(found: Calibration) -> Grid:
    """Return the rates of each kernel, type, number of tokens and width."""
    rows = [
        (a.kernel, a.dtype, str(a.tokens), str(a.width), f"{a.rate / 1e12:.3g}",
         _mib(a.scratch_bytes), _mib(a.formula_bytes))
        for a in found.ceilings.attention
    ]  # fmt: skip
    heads = ("Kernel", "Type", "Tokens", "Head", "TFLOP/s", "Scratch MiB", "By formula MiB")
    return table("Attention, forward and backward", heads, rows)


def _mib(size: int | None) -> str:
    return NONE if size is None else f"{size / MIB:.1f}"


# ---- rows ----


def times(found: Calibration) -> Grid:
    """Return predicted and measured step times, also by a fit to the other rows alone."""
    fit, errors = fitted(found.rows), left_out_errors(found.rows)
    timed = [row for row in found.rows if row.timed]
    known = [error for error in errors if error is not None]
    named = zip(labels(found.rows), found.rows, errors, strict=True)
    heads = ("Row", "Measured ms", "Typical %", "Fitted ms", "Fitted %", "Left out %")
    rows = [_time(label, row, fit, error) for label, row, error in named if row.timed]
    usual = CPU_SPREAD if found.device.kind == "cpu" else REACH
    return table("Time of a step", heads, rows, _of_times(fit, timed, known, usual))


def _of_times(
    fit: Fitted,
    timed: Sequence[MeasuredRow],
    errors: Sequence[float],
    usual: Mapping[str, float],
) -> str:
    """Return the fitted factors, and the errors of rows with them."""
    if not fit.rows:
        return "Too few rows to fit anything."
    words = ", ".join(f"{part} x{factor:.2f}" for part, factor in fit.factors.items())
    share = max(fit.shares.values())
    typical = [abs(error) for row in timed if (error := _typical(row)) is not None]
    sentences = [
        f"Factors beyond the ceilings: {words}.{_host(fit)}",
        f"Nine of ten predictions within {100 * share:.0f} % (typical figures claim "
        f"{_range(list(usual.values()))}).",
        f"Median error by typical figures {_middle(typical)}, by the fit to the other rows alone "
        f"(left out) {_middle([abs(error) for error in errors])}.",
    ]
    compute = fit.factors.get("compute", 1.0)
    if compute > SLOW:
        sentences.append(
            f"x{compute:.1f} of the ceilings' time is too much for a card: most rows waited for "
            "the host, or other programs used the card. Calibrate again with larger batches."
        )
    return " ".join(sentences)


def _host(fit: Fitted) -> str:
    return f" The host issues an operation in {1e6 * fit.host:.0f} us." if fit.host else ""


def _range(shares: Sequence[float]) -> str:
    low, high = (f"{100 * share:.0f} %" for share in (min(shares), max(shares)))
    return low if low == high else f"{low} to {high}"


def _middle(values: Sequence[float]) -> str:
    return f"{100 * statistics.median(values):.0f} %" if values else "not known"


def _typical(row: MeasuredRow) -> float | None:
    """Return the relative error of typical figures."""
    if row.typical_seconds is None or not row.step_seconds:
        return None
    return row.typical_seconds / row.step_seconds - 1


def _time(label: str, row: MeasuredRow, found: Fitted, error: float | None) -> list[str]:
    fit, took = predicted_seconds(row, found.factors, found.host), row.step_seconds or 0.0
    cells = [label, f"{1e3 * took:.0f}", _percent(_typical(row))]
    return [*cells, f"{1e3 * fit:.0f}", _percent(fit / took - 1), _percent(error)]


def _percent(error: float | None) -> str:
    return NONE if error is None else f"{100 * error:+.1f}"


def memory(found: Calibration) -> Grid:
    """Return predicted and measured bytes."""
    heads = ("Row", "Step GiB", "Error %", "Run GiB", "Error %", "Reserved GiB", "Error %", "Why")
    rows = [
        [label, *_pair(row.step), *_pair(row.run), *_pair(row.reserved), row.reason or NONE]
        for label, row in zip(labels(found.rows), found.rows, strict=True)
    ]
    note = (
        "GiB as measured. Step: tensors of a step, against the run's own trace. Run: the whole "
        "run, against the meter, an independent measure. Why: there is no number."
    )
    return table("Memory", heads, rows, note)


def categories(found: Calibration) -> Grid:
    """Return the error of each category of a step, in percent."""
    names = [name for name in CATEGORIES if any(name in row.categories for row in found.rows)]
    rows = [
        [label, *(_error(row.categories.get(name)) for name in names)]
        for label, row in zip(labels(found.rows), found.rows, strict=True)
        if row.categories
    ]
    heads = ["Row", *(name.replace("_", " ").capitalize() for name in names)]
    note = "Percent, predicted against traced; of categories above 5 % of the step's peak."
    return table("Memory by category, errors", heads, rows, note)


def _error(pair: Sequence[int] | None) -> str:
    if pair is None:
        return NONE
    return f"{100 * (pair[0] / pair[1] - 1):+.2f}" if pair[1] else "inf"


def _pair(pair: Sequence[int]) -> tuple[str, str]:
    if len(pair) != 2:
        return NONE, NONE
    return f"{pair[1] / GIB:.3f}", f"{100 * (pair[0] / pair[1] - 1):+.2f}"


def stations(outcomes: Sequence[Outcome]) -> Grid:
    """Return the outcome of every station."""
    rows = [
        (f"{o.part}: {o.station}", o.status, f"{o.seconds:.0f}" if o.seconds else NONE, o.reason)
        for o in outcomes
    ]
    return table("Stations", ("Station", "Ended", "Seconds", "Why"), rows)

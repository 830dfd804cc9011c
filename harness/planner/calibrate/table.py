"""Tables of a calibration: its ceilings, and rows beside their predicted times. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from harness.planner import overhead
from harness.planner.calibration.record import (
    Calibration,
    Fitted,
    MeasuredRow,
    fitted,
    labels,
    predicted_seconds,
)
from harness.planner.speed import rates
from harness.planner.speed.roofline import CPU_SPREAD, SPREAD
from harness.report.data.grid import Grid
from harness.report.figures.units import MIB
from harness.report.rendering.pages import table_lines

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


def tables(calibration: Calibration) -> list[Grid]:
    """Return every table of a calibration that has rows."""
    made = [ceilings(calibration), attention(calibration), times(calibration)]
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
    """Return measured step times, and errors of typical figures and of the fit."""
    fit, timed = fitted(found.rows), [row for row in found.rows if row.timed]
    names = dict(zip(map(id, found.rows), labels(found.rows), strict=True))
    heads = ("Row", "Measured ms", "Typical %", "Fitted ms", "Fitted %")
    rows = []
    for row in timed:
        fit_seconds = predicted_seconds(row, fit.factors, fit.host)
        rows.append([
            names[id(row)], f"{1e3 * row.step_seconds:.0f}", _error(row, row.typical_seconds),
            f"{1e3 * fit_seconds:.0f}", _error(row, fit_seconds),
        ])  # fmt: skip
    usual = CPU_SPREAD if found.device.kind == "cpu" else SPREAD
    return table("Time of a step", heads, rows, _of_times(fit, timed, usual))


def _error(row: MeasuredRow, predicted: float | None) -> str:
    return NONE if predicted is None else f"{100 * (predicted / row.step_seconds - 1):+.1f}"


def _of_times(fit: Fitted, timed: Sequence[MeasuredRow], usual: Mapping[str, float]) -> str:
    """Return the fitted factors, and the errors of rows with them."""
    if not fit.rows:
        return "Too few rows to fit anything."
    words = ", ".join(f"{part} x{factor:.2f}" for part, factor in fit.factors.items())
    host = f" The host issues an operation in {1e6 * fit.host:.0f} us." if fit.host else ""
    low, high = (f"{100 * end(usual.values()):.0f}" for end in (min, max))
    claimed = f"{low} %" if low == high else f"{low} to {high} %"
    sentences = [
        f"Factors beyond the ceilings: {words}.{host}",
        f"The {fit.rows} fitted rows are within {100 * max(fit.shares.values()):.0f} % (typical "
        f"figures claim {claimed}).",
    ]
    typical = [abs(row.typical_seconds / row.step_seconds - 1)
               for row in timed if row.typical_seconds is not None]  # fmt: skip
    if typical:
        middle = 100 * statistics.median(typical)
        sentences.append(f"Median error by typical figures {middle:.0f} %.")
    compute = fit.factors.get("compute", 1.0)
    if compute > SLOW:
        sentences.append(
            f"x{compute:.1f} of the ceilings' time is too much for a card: most rows waited for "
            "the host, or other programs used the card. Calibrate again with larger batches."
        )
    return " ".join(sentences)

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
    left_out_errors,
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
    """Return predicted and measured step times, also by a fit to the other rows alone."""
    fit, errors = fitted(found.rows), left_out_errors(found.rows)
    timed = [row for row in found.rows if row.timed]
    known = [error for error in errors if error is not None]
    named = zip(labels(found.rows), found.rows, errors, strict=True)
    heads = ("Row", "Measured ms", "Typical %", "Fitted ms", "Fitted %", "Left out %")
    rows = [_time(label, row, fit, error) for label, row, error in named if row.timed]
    usual = CPU_SPREAD if found.device.kind == "cpu" else SPREAD
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

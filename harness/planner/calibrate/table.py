"""The table of a calibration: what was measured, beside typical and fitted figures. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from harness.planner import overhead
from harness.planner.calibration.record import Calibration, fitted, labels, predicted_seconds
from harness.planner.speed import rates
from harness.planner.speed.roofline import CPU_SPREAD, SPREAD
from harness.report.data.grid import Grid, text_grid
from harness.report.figures.units import MIB

UNITS = {"TFLOP/s": 1e12, "GB/s": 1e9, "us": 1e-6, "ms": 1e-3, "MiB": MIB}
HEADS = {"What": "text", "Measured": "count", "Typical": "count", "Fitted": "count"}
SLOW = 3.0
"""Factor of compute from which a fit is of something else than the card."""


def table(found: Calibration) -> Grid:
    """Return rates, fixed bytes and step times beside what predictions say without them."""
    lines = [*_rates(found), *_bytes(found), *_steps(found)]
    title = f"Calibration of {found.device.name}"
    return text_grid("calibration", title, HEADS, lines, _note(found))


def _line(what: str, unit: str, *values: float | None) -> list[str]:
    """Return a row of measured, typical and fitted value; "-" for one that is unknown."""
    cells = []
    for value in (*values, None, None)[:3]:
        scaled = (value or 0.0) / UNITS[unit]
        digits = f"{scaled:.0f}" if scaled >= 100 else f"{scaled:.3g}"
        cells.append("-" if value is None else f"{digits} {unit}")
    return [what, *cells]


def _rates(found: Calibration) -> Iterator[list[str]]:
    typical, made = rates.rates(rates.of_device(found.device), 1), found.ceilings
    products = {"": made.products, ", a DiT's shapes": made.model_products}
    for shapes, measured in products.items():
        for name, rate in measured.items():
            kind, depth = ("float32" if name == "tf32" else name), (0 if shapes else rates.WIDE)
            usual = typical.product(kind, tf32=name == "tf32", depth=depth)
            yield _line(f"products {name}{shapes}", "TFLOP/s", rate, usual)
    for one in made.attention:
        what = f"attention {one.kernel} {one.dtype}, {one.tokens} tokens, heads of {one.width}"
        yield _line(what, "TFLOP/s", one.rate)
        if one.scratch_bytes is not None:
            yield _line("- its scratch memory", "MiB", one.scratch_bytes, one.formula_bytes)
    for stream in made.streams:
        usual = typical.streaming(stream.bytes)
        yield _line(f"elementwise, {stream.bytes / MIB:.0f} MiB", "GB/s", stream.rate, usual)
    for way, rate in made.copies.items():
        yield _line(f"copies, {way}", "GB/s", rate, typical.to_host)
    if made.host_rate:
        yield _line("host memory", "GB/s", made.host_rate)
    if made.launch_seconds:
        yield _line("a launch", "us", made.launch_seconds, typical.launch)
    if made.collective:
        what, sent = f"all-reduce of {made.collective.ranks}", made.collective
        yield _line(f"{what}, large", "GB/s", sent.rate, typical.wire)
        yield _line(f"{what}, small", "us", sent.seconds, typical.collective_seconds)


def _bytes(found: Calibration) -> Iterator[list[str]]:
    typical = overhead.fixed_overhead(rates.of_device(found.device), 2)
    names = {
        "context": "context" if found.device.kind == "cuda" else "interpreter and libraries",
        "libraries": "library workspaces",
        "communication": "communication",
    }
    for name, what in names.items():
        size = getattr(found.standing, name)
        if size is not None:
            yield _line(what, "MiB", size, getattr(typical, name))


def _steps(found: Calibration) -> Iterator[list[str]]:
    fit = fitted(found.rows)
    for label, row in zip(labels(found.rows), found.rows, strict=True):
        if row.timed:
            by_fit = predicted_seconds(row, fit.factors, fit.host) if fit.rows else None
            yield _line(f"step of {label}", "ms", row.step_seconds, row.typical_seconds, by_fit)


def _note(found: Calibration) -> str:
    """Return the fitted factors, and the errors of rows with them."""
    fit = fitted(found.rows)
    if not fit.rows:
        return "Too few rows to fit anything."
    words = ", ".join(f"{part} x{factor:.2f}" for part, factor in fit.factors.items())
    host = f" The host issues an operation in {1e6 * fit.host:.0f} us." if fit.host else ""
    usual = CPU_SPREAD if found.device.kind == "cpu" else SPREAD
    low, high = (f"{100 * end(usual.values()):.0f}" for end in (min, max))
    claimed = f"{low} %" if low == high else f"{low} to {high} %"
    sentences = [
        f"Factors beyond the ceilings: {words}.{host}",
        f"The {fit.rows} fitted rows are within {100 * max(fit.shares.values()):.0f} % (typical "
        f"figures claim {claimed}).",
    ]
    typical = [abs(row.typical_seconds / row.step_seconds - 1)
               for row in found.rows if row.timed and row.typical_seconds]  # fmt: skip
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

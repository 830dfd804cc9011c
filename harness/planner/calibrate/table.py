"""The table of a calibration: what was measured, beside typical figures. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from harness.planner import overhead
from harness.planner.calibration.record import Calibration
from harness.planner.speed import rates
from harness.report.data.grid import Grid, text_grid
from harness.report.figures.units import MIB

UNITS = {"TFLOP/s": 1e12, "GB/s": 1e9, "us": 1e-6, "MiB": MIB}
HEADS = {"What": "text", "Measured": "count", "Typical": "count"}


def table(found: Calibration) -> Grid:
    """Return rates and fixed bytes beside what predictions take without them."""
    title = f"Calibration of {found.device.name}"
    return text_grid("calibration", title, HEADS, [*_rates(found), *_bytes(found)])


def _line(what: str, unit: str, *values: float | None) -> list[str]:
    """Return a row of measured and typical value; "-" for one that is unknown."""
    cells = []
    for value in (*values, None)[:2]:
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

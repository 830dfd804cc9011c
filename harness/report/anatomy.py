"""The anatomy of one run, a section of its page: memory and time by part. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.memory.memory_breakdown import Kept, MemoryBreakdown, OpCost, Timeline
from harness.report.data.grid import Column, Grid, tabulate
from harness.report.data.grouping import of_usable
from harness.report.data.rows import SuiteHead
from harness.report.figures import units
from harness.report.figures.units import CATEGORIES, title
from harness.report.rendering import pages
from harness.report.rendering.charts import COLOUR_OF
from harness.report.rendering.svg import (
    COLOURS,
    Scale,
    axes,
    element,
    picture,
    place_labels,
    text,
)
from harness.result import load
from strategies.engine import STEP_PHASES


def attainable(flops_a_byte: float, peak_flops: float, bandwidth: float) -> float:
    """Return FLOP/s under the roofline (Williams et al. 2009): the memory's rate or the peak."""
    return min(peak_flops, flops_a_byte * bandwidth)


def intensity(cost: OpCost) -> float:
    """Return FLOPs per byte moved."""
    return cost.flops / cost.bytes if cost.bytes else 0.0


# ---- charts ----


WIDE = 1200.0
"""Width of a chart over the whole page."""
SHOWN_OPS = 16
PHASE_KEYS = list(zip(STEP_PHASES, COLOURS, strict=False))
"""Name and colour of each phase."""


def timeline(line: Timeline) -> str:
    """Draw the live bytes at each operation of the step, stacked, with the peak marked."""
    height, top = 300.0, 40.0
    end, high = line.marks[-1][0], line.peak_bytes / units.MIB
    x, y = Scale(0, max(end, 1), 56.0, WIDE - 12), Scale(0, high * 1.06, height, top)
    parts = axes(x, y, "operations run since the step began", "MiB", top)
    below, spots = [0.0] * len(line.op), [*line.op, end]

    def stairs(heights: Sequence[float]) -> list[str]:
        """Return the points of a staircase: each height holds until the next operation."""
        pairs = [(x(spots[i + after]), y(v)) for i, v in enumerate(heights) for after in (0, 1)]
        return [f"{a:.1f},{b:.1f}" for a, b in pairs]

    for name in CATEGORIES:
        above = [b + v / units.MIB for b, v in zip(below, line.bytes[name], strict=True)]
        if any(line.bytes[name]):
            path = f"M{'L'.join([*stairs(above), *reversed(stairs(below))])}Z"
            tip = element("title", title(name))
            parts.append(element("path", tip, d=path, fill=COLOUR_OF[name], class_="area"))
        below = above
    for (start, phase), (stop, _) in pairwise(line.marks):
        at = x(start)
        parts.append(element("line", x1=at, x2=at, y1=top - 12, y2=height, class_="border"))
        if x(stop) - at > 50:
            parts.append(text((at + x(stop)) / 2, top - 4, phase, class_="label mid"))
        elif stop == end:  # the optimizer has few operations, at the end
            parts.append(text(x(stop), top - 16, phase, class_="label end"))
    at, level, label = x(line.peak_op), y(high), f"peak {high:.1f} MiB: {short_op(line.peak_maker)}"
    label += f" in {line.peak_module}" if line.peak_module else ""
    late = at > WIDE / 2
    parts.append(element("circle", cx=at, cy=level, r=4.5, class_="mark"))
    look = {"class_": "label end" if late else "label", "font_weight": 650}
    parts.append(text(at + (-10 if late else 10), level - 6, label, **look))
    return picture(WIDE, height + 36, parts, "Memory over one step, by category")


def short_op(name: str) -> str:
    """Return an operation's short name: ``sum`` for ``aten.sum.dim_IntList``."""
    plain = name.removeprefix("aten.").partition(".")[0].strip("_")
    plain = plain.replace("scaled_dot_product_", "sdpa_").replace("_for_cpu", "")
    return plain if len(plain) < 34 else f"{plain[:31]}..."


def roofline(breakdown: MemoryBreakdown) -> str:
    """Draw each operation's arithmetic intensity and FLOP/s, under this device's own ceilings."""
    costs = [c for c in breakdown.ops if c.flops and c.bytes and c.seconds > 0][:SHOWN_OPS]
    places = [(intensity(c), c.flops / c.seconds) for c in costs]
    if not costs:
        return ""
    ridge = breakdown.peak_flops / breakdown.bandwidth
    low = 10 ** math.floor(math.log10(min(p[0] for p in places)))
    high = 10 ** math.ceil(math.log10(max(*(p[0] for p in places), 2 * ridge)))
    floor = 10 ** math.floor(math.log10(min(p[1] for p in places)))
    x = Scale(low, high, 62.0, WIDE - 12, log=True)
    y = Scale(floor, 10 ** math.ceil(math.log10(breakdown.peak_flops)), 330.0, 26.0, log=True)
    parts = axes(x, y, "arithmetic intensity: FLOPs a byte moved", "FLOP/s", y.end)
    start = max(low, floor / breakdown.bandwidth)
    corner = [(start, attainable(start, breakdown.peak_flops, breakdown.bandwidth))]
    corner += [(ridge, breakdown.peak_flops), (high, breakdown.peak_flops)]
    path = "M" + "L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in corner)
    parts.append(element("path", d=path, class_="roof"))
    all_seconds = sum(c.seconds for c in costs)
    spots = [(x(a), y(b)) for a, b in places]
    radii = [3 + 16 * math.sqrt(c.seconds / all_seconds) for c in costs]
    names, frame = [short_op(c.op) for c in costs], (x.start, y.end, x.end, y.start)
    labels = place_labels(spots, radii, names, frame)
    for cost, (cx, cy), radius, name, label in zip(costs, spots, radii, names, labels, strict=True):
        share = f"{cost.calls} calls, {100 * cost.seconds / all_seconds:.0f} %"
        tip = element("title", f"{cost.op} ({cost.phase}): {share}")
        fill = dict(PHASE_KEYS).get(cost.phase, COLOURS[6])
        parts.append(element("circle", tip, cx=cx, cy=cy, r=radius, class_="op", fill=fill))
        if label:
            parts.append(text(*label, name, class_="label"))
    return picture(WIDE, 366, parts, "Roofline of this device")


# ---- page ----


ROWS = 24
"""Rows of a table; further ones are summed up."""


LUMPS = (
    Column("Category", lambda r: title(r.category)),
    Column("Made by", lambda r: "before the step" if r.maker == "before" else short_op(r.maker)),
    Column("In module", lambda r: r.module or "outside the model"),
    Column("Tensors", lambda r: r.count, "count"),
    Column("MiB", lambda r: r.bytes, "mib"),
)
KEPT = (
    Column("Module", lambda r: r.module or "outside the model (batch, loss)"),
    Column("Of this name", lambda r: r.count, "count"),
    Column("Made here and kept MiB", lambda r: r.made, "mib"),
)


def write(breakdown: MemoryBreakdown, folder: Path) -> list[Path]:
    """Write the page of the run in ``folder``, with its anatomy, and return its path.

    A folder without a result has a page of the anatomy alone.
    """
    path = folder / "result.json"
    results = [load(path)] if path.exists() else []
    anatomy = section(breakdown)
    html = of_usable(results, [], SuiteHead(name=breakdown.recipe), {},
                     lambda report: pages.render_html(report, anatomy))  # fmt: skip
    (folder / "anatomy.html").write_text(html, encoding="utf-8")
    return [folder / "anatomy.html"]


def section(p: MemoryBreakdown) -> dict[str, Any]:
    """Return what the page's section shows."""
    line = p.timeline
    sizes = sorted(((size, name) for name, size in line.at_peak().items()), reverse=True)
    alive = ", ".join(
        f"{units.in_sentence(name)} {100 * size / line.peak_bytes:.0f} %"
        for size, name in sizes
        if size > 0.005 * line.peak_bytes
    )
    where = f" in {line.peak_module}" if line.peak_module else ""
    site = f" ({line.peak_site})" if line.peak_site else ""
    peak = f"{line.peak_bytes / units.MIB:.1f} MiB in phase {line.peak_phase}"
    last = f"The last allocation before it is by {short_op(line.peak_maker)}{where}{site}"
    cpu = "host memory stands in for a GPU's, and attention is the CPU's kernel. "
    return {
        "setting": (
            f"{p.model} ({p.parameters / 1e6:.1f} M parameters, {p.tokens} tokens a sample), "
            f"global batch {p.global_batch}, micro batch {p.micro_batch}, {p.dtype}, rank 0 of "
            f"{p.processes} on {p.device}."
        ),
        "stamp": (
            "Bytes are those of tensors, followed one by one through an extra step after the "
            f"measured ones; {cpu * (p.device == 'cpu')}What the allocator rounds up or keeps in "
            "reserve is not in them."
        ),
        "answers": [("Peak of a step", peak, f"{alive}. {last}")],
        "timeline": timeline(line),
        "keys": [(title(name), COLOUR_OF[name]) for name in CATEGORIES],
        "tables": [
            tabulate("lumps", "What lived at the peak", LUMPS, p.lumps[:ROWS]),
            tabulate("kept", "Activations by module", KEPT, _modules(p), note=KEPT_NOTE),
            _operations(p),
        ],
        "roofline": roofline(p),
        "phases": PHASE_KEYS,
    }


KEPT_NOTE = (
    "When the first backward begins. Made here and kept: storages that an operation of this module "
    "made, alive then. * stands for every block."
)


def _modules(p: MemoryBreakdown) -> list[Kept]:
    """Return the modules that keep most, the sum of the others, and the sum of all."""

    def total(name: str, some: Sequence[Kept]) -> Kept:
        return Kept(module=name, count=sum(r.count for r in some), made=sum(r.made for r in some))

    shown, rest = p.kept[:ROWS], p.kept[ROWS:]
    smaller = [total(f"{len(rest)} smaller", rest)] if rest else []
    return [*shown, *smaller, total("all", p.kept)]


def _operations(p: MemoryBreakdown) -> Grid:
    """Return the operations that take longest, and their share of the roof."""
    all_seconds, rest = sum(c.seconds for c in p.ops) or 1.0, p.ops[ROWS:]

    def reached(cost: OpCost) -> float:
        roof = attainable(intensity(cost), p.peak_flops, p.bandwidth)
        return cost.flops / cost.seconds / roof if cost.seconds and roof else 0.0

    columns = (
        Column("Operation", lambda c: c.op),
        Column("Phase", lambda c: c.phase),
        Column("Calls", lambda c: c.calls, "count"),
        Column("Time %", lambda c: c.seconds / all_seconds, "percent"),
        Column("GFLOP", lambda c: c.flops, "giga"),
        Column("MiB moved", lambda c: c.bytes, "mib"),
        Column("FLOPs a byte", intensity, "ratio"),
        Column("% of the roof", reached, "percent"),
    )
    share = 100 * sum(c.seconds for c in rest) / all_seconds
    more = f" {len(rest)} more operations take {share:.1f} % of the time." if rest else ""
    note = (
        f"Ceilings {'of the calibration' if p.ceilings else 'measured here'}: "
        f"{p.peak_flops / 1e9:.0f} GFLOP/s ({p.dtype} products), "
        f"{p.bandwidth / 1e9:.1f} GB/s (copies); the ridge is at "
        f"{p.peak_flops / p.bandwidth:.1f} FLOPs a byte. A circle's area is its share of the time. "
        "Bytes are operands and results once each, so what stays in cache can lie above the roof. "
        f"{p.ceilings}{more}"
    )
    return tabulate("ops", "Operations", columns, p.ops[:ROWS], note=note)

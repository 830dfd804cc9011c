"""Charts of an anatomy page, as SVG; and the laws of a DiT's activation memory and FLOPs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.memory.memory_breakdown import MemoryBreakdown, OpCost, Point, Timeline
from harness.report.figures import units
from harness.report.figures.units import CATEGORIES, title
from harness.report.rendering.charts import COLOUR_OF
from harness.report.rendering.svg import (
    COLOURS,
    WIDTH,
    Scale,
    axes,
    element,
    padded,
    picture,
    place_labels,
    polyline,
    text,
)
from harness.subjects.dit.presets import PRESETS, train_flops, trainable_count
from strategies.engine import STEP_PHASES

# ---- laws ----
# Activation memory and FLOPs by size of a DiT, fitted to measured points.


@dataclass(frozen=True)
class Law:
    """Activation bytes = B (block T D L + ends T D + sample D L), for batch B, tokens T, hidden
    units D and blocks L.

    ``block``: bytes a token, hidden unit and block. ``ends``: bytes a token and hidden unit
    outside the blocks. ``sample``: bytes a sample, hidden unit and block (the modulation).
    ``worst`` is the largest relative error over the points it was fitted to.
    """

    block: float
    ends: float
    sample: float
    worst: float = 0.0

    def __call__(self, batch: int, tokens: int, hidden: int, depth: int) -> float:
        """Return the bytes of a step's activations."""
        unit_bytes = self.block * tokens * depth + self.ends * tokens + self.sample * depth
        return batch * hidden * unit_bytes


def fit(points: Sequence[Point]) -> Law:
    """Fit by least squares of relative errors, so that small models count as much as large ones.

    Raises:
        ValueError: fewer than four points, or points that do not separate the terms.
    """
    rows = np.array([_terms(p) for p in points], dtype=float)
    sizes = np.array([p.activation_bytes for p in points], dtype=float)
    if len(points) < 4 or np.linalg.matrix_rank(rows / sizes[:, None]) < 3:
        raise ValueError(f"{len(points)} points do not tell the law's three terms apart")
    factors, *_ = np.linalg.lstsq(rows / sizes[:, None], np.ones(len(points)), rcond=None)
    errors = np.abs(rows @ factors / sizes - 1)
    return Law(*map(float, (*factors, errors.max())))


def _terms(p: Point) -> tuple[int, int, int]:
    width = p.batch * p.hidden
    return width * p.tokens * p.depth, width * p.tokens, width * p.depth


def six_nd_error(parameters: int, tokens: int, flops: float) -> float:
    """Return the relative error of 6 N D against a training step's counted FLOPs; + is too many.

    N trainable parameters, D tokens of the whole batch (Kaplan et al. 2020, arXiv:2001.08361).
    A DiT's adaLN weights, a third of a block, run once per sample, not per token. 6 N D leaves
    out attention's products of activations, which compensates part of it at many tokens.
    """
    return 6 * parameters * tokens / flops - 1


def preset_errors(input_size: int = 32) -> list[tuple[str, int, float]]:
    """Return (preset, tokens, error of 6 N D) of every preset, from the closed form of FLOPs."""
    errors = []
    for name, shape in PRESETS.items():
        tokens, flops = shape.tokens(input_size), train_flops(shape, input_size)
        error = six_nd_error(trainable_count(shape, input_size), tokens, flops)
        errors.append((name, tokens, error))
    return errors


def attainable(flops_a_byte: float, peak_flops: float, bandwidth: float) -> float:
    """Return FLOP/s under the roofline (Williams et al. 2009): the memory's rate or the peak."""
    return min(peak_flops, flops_a_byte * bandwidth)


def intensity(cost: OpCost) -> float:
    """Return FLOPs per byte moved."""
    return cost.flops / cost.bytes if cost.bytes else 0.0


WIDE = 1200.0
"""Width of a chart over the whole page."""
SHOWN_OPS = 16
FRAME = 48.0
"""Space left of a chart, for the labels of its y axis."""
SWEEPS = {
    "batch": ("batch", "samples"),
    "depth": ("depth", "blocks"),
    "tokens": ("tokens", "tokens a sample"),
    "width": ("hidden", "hidden units"),
}
"""Varied size -> its field of ``Point``, and the label of its axis."""


def keys() -> list[tuple[str, str]]:
    """Return the name and colour of each category, in the order of the stack."""
    return [(title(name), COLOUR_OF[name]) for name in CATEGORIES]


def timeline(line: Timeline) -> str:
    """Draw the live bytes at each operation of the step, stacked, with the peak marked."""
    height, top = 300.0, 40.0
    last = max(line.marks[-1][0], 1)
    high = line.peak_bytes / units.MIB
    x, y = Scale(0, last, 56.0, WIDE - 12), Scale(0, high * 1.06, height, top)
    parts = axes(x, y, "operations run since the step began", "MiB", top)
    parts += _areas(line, x, y)
    parts += _phases(line, x, height, top)
    parts += _peak(line, x, y, high)
    return picture(WIDE, height + 36, parts, "Memory over one step, by category")


def _areas(line: Timeline, x: Scale, y: Scale) -> list[str]:
    below = [0.0] * len(line.op)
    spots = [*line.op, line.marks[-1][0]]
    parts = []
    for name in CATEGORIES:
        above = [b + v / units.MIB for b, v in zip(below, line.bytes[name], strict=True)]
        if any(line.bytes[name]):
            path = f"M{_steps(spots, above, x, y)}L{_steps(spots, below, x, y, back=True)}Z"
            tip = element("title", title(name))
            parts.append(element("path", tip, d=path, fill=COLOUR_OF[name], class_="area"))
        below = above
    return parts


def _steps(
    ops: Sequence[int], heights: Sequence[float], x: Scale, y: Scale, *, back: bool = False
) -> str:
    """Return a staircase: each height holds until the next operation."""
    pairs = []
    for index, value in enumerate(heights):
        pairs += [(x(ops[index]), y(value)), (x(ops[index + 1]), y(value))]
    return "L".join(f"{a:.1f},{b:.1f}" for a, b in (reversed(pairs) if back else pairs))


def _phases(line: Timeline, x: Scale, bottom: float, top: float) -> list[str]:
    parts = []
    for (start, phase), (stop, _) in zip(line.marks, line.marks[1:], strict=False):
        at = x(start)
        parts.append(element("line", x1=at, x2=at, y1=top - 12, y2=bottom, class_="border"))
        if x(stop) - at > 50:
            parts.append(text((at + x(stop)) / 2, top - 4, phase, class_="label mid"))
        elif stop == line.marks[-1][0]:  # the optimizer has few operations, at the end
            parts.append(text(x(stop), top - 16, phase, class_="label end"))
    return parts


def _peak(line: Timeline, x: Scale, y: Scale, high: float) -> list[str]:
    at, level = x(line.peak_op), y(high)
    label = f"peak {high:.1f} MiB: {short_op(line.peak_maker)}"
    label += f" in {line.peak_module}" if line.peak_module else ""
    side = {"class_": "label end"} if at > WIDE / 2 else {"class_": "label"}
    shift = -10 if at > WIDE / 2 else 10
    ring = element("circle", cx=at, cy=level, r=4.5, class_="mark")
    return [ring, text(at + shift, level - 6, label, **side, font_weight=650)]


def bars(breakdown: MemoryBreakdown) -> str:
    """Draw the live bytes at the peak of a training step, and of inference on the same batch."""
    lines = [
        ("training", breakdown.timeline.at_peak()),
        ("inference amid training", breakdown.inference.at_peak()),
        ("inference alone", breakdown.inference_alone),
    ]
    top, left, row = 8.0, 140.0, 34.0
    high = breakdown.timeline.peak_bytes / units.MIB
    x = Scale(0, high, left, WIDTH - 50)
    bottom = top + row * len(lines)
    parts = [element("line", x1=x(v), x2=x(v), y1=top, y2=bottom, class_="grid") for v in x.ticks()]
    parts += [text(x(v), bottom + 15, f"{v:g}", class_="tick mid") for v in x.ticks()]
    for index, (name, sizes) in enumerate(lines):
        at = top + index * row
        parts.append(text(left - 8, at + 21, name, class_="label end"))
        parts += _bar(sizes, x, at)
    parts.append(text((left + WIDTH) / 2, bottom + 31, "MiB at the peak", class_="axis mid"))
    return picture(WIDTH, bottom + 38, parts, "Training against inference")


def _bar(sizes: Mapping[str, int], x: Scale, top: float) -> list[str]:
    parts, before = [], 0.0
    for name in CATEGORIES:
        size = sizes.get(name, 0) / units.MIB
        tip = element("title", f"{title(name)}: {size:.1f} MiB")
        box = {"x": x(before), "y": top + 6, "width": x(size) - x(0), "height": 20}
        if size:
            parts.append(element("rect", tip, **box, fill=COLOUR_OF[name], class_="part"))
        before += size
    return [*parts, text(x(before) + 6, top + 21, f"{before:.1f}", class_="value")]


def sweep(points: Sequence[Point], varies: str, law: Law) -> str:
    """Draw activation bytes by one size: measured points, and the law's line."""
    mine = [p for p in points if p.varies == varies]
    field, name = SWEEPS[varies]
    sizes = [getattr(p, field) for p in mine]
    x = Scale(0, max(sizes) * 1.04, FRAME, WIDTH / 2 - 10)
    y = Scale(0, max(p.activation_bytes for p in mine) / units.MIB * 1.1, 170.0, 26.0)
    parts = axes(x, y, name, "activations, MiB", 26.0)
    spots = []
    for share in range(41):
        size = max(sizes) * share / 40
        fixed = {key: getattr(mine[0], key) for key in ("batch", "tokens", "hidden", "depth")}
        values = fixed | {field: size}
        spots.append((x(size), y(law(**values) / units.MIB)))
    parts.append(element("path", d=polyline(spots), class_="curve", stroke=COLOURS[0]))
    parts += [
        element("circle", cx=x(s), cy=y(p.activation_bytes / units.MIB), r=3.6, fill=COLOURS[1])
        for s, p in zip(sizes, mine, strict=True)
    ]
    return picture(WIDTH / 2, 210, parts, f"Activation memory against {name}")


def preset_chart() -> str:
    """Draw the error of 6 N D for each preset, by its number of tokens."""
    errors = preset_errors()
    values = [100 * error for _, _, error in errors]
    x = Scale(10, 400, FRAME, WIDTH - 20, log=True)
    y = Scale(*padded([0.0, *values], 0.1), 220.0, 26.0)
    parts = [element("line", x1=FRAME, x2=WIDTH - 20, y1=y(v), y2=y(v), class_="grid")
             for v in y.ticks()]  # fmt: skip
    parts += [text(FRAME - 6, y(v) + 4, f"{v:g}", class_="tick end") for v in y.ticks()]
    for index, family in enumerate(_families()):
        line = sorted((t, e) for name, t, e in errors if name.startswith(f"{family}/"))
        spots = [(x(t), y(100 * e)) for t, e in line]
        colour = COLOURS[index]
        parts.append(element("path", d=polyline(spots), class_="curve", stroke=colour))
        parts += [element("circle", cx=a, cy=b, r=3.2, fill=colour) for a, b in spots]
    for tokens in sorted({t for _, t, _ in errors}):
        parts.append(text(x(tokens), 235, f"{tokens}", class_="tick mid"))
    parts.append(
        text(
            (FRAME + WIDTH - 20) / 2,
            251,
            "tokens a sample (patches of 8, 4, 2)",
            class_="axis mid",
        )
    )
    parts.append(text(4, 17, "6 N D over the counted FLOPs, % too many", class_="axis"))
    return picture(WIDTH, 260, parts, "Error of 6 N D for each preset")


def short_op(name: str) -> str:
    """Return an operation's short name: ``sum`` for ``aten.sum.dim_IntList``."""
    plain = name.removeprefix("aten.").partition(".")[0].strip("_")
    plain = plain.replace("scaled_dot_product_", "sdpa_").replace("_for_cpu", "")
    return plain if len(plain) < 34 else f"{plain[:31]}..."


def phase_keys() -> list[tuple[str, str]]:
    """Return the name and colour of each phase in the roofline."""
    return list(zip(STEP_PHASES, COLOURS, strict=False))


def family_keys() -> list[tuple[str, str]]:
    """Return the name and colour of each family of presets."""
    return [(family, COLOURS[index]) for index, family in enumerate(_families())]


def _families() -> list[str]:
    return list(dict.fromkeys(name.partition("/")[0] for name, _, _ in preset_errors()))


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
    path = polyline([(x(a), y(b)) for a, b in corner])
    parts.append(element("path", d=path, class_="roof"))
    return picture(WIDE, 366, parts + _ops(costs, places, x, y), "Roofline of this device")


def _ops(
    costs: Sequence[OpCost], places: Sequence[tuple[float, float]], x: Scale, y: Scale
) -> list[str]:
    whole = sum(c.seconds for c in costs)
    spots = [(x(a), y(b)) for a, b in places]
    radii = [3 + 16 * math.sqrt(c.seconds / whole) for c in costs]
    names = [short_op(c.op) for c in costs]
    discs = [(a - r, b - r, a + r, b + r) for (a, b), r in zip(spots, radii, strict=True)]
    labels = place_labels(spots, names, (x.start, y.end, x.end, y.start), discs)
    colour = dict(phase_keys())
    parts = []
    rows = zip(costs, spots, radii, names, labels, strict=True)
    for cost, (cx, cy), radius, name, label in rows:
        tip = f"{cost.op} ({cost.phase}): {cost.calls} calls, {100 * cost.seconds / whole:.0f} %"
        parts.append(
            element("circle", element("title", tip), cx=cx, cy=cy, r=radius, class_="op",
                    fill=colour.get(cost.phase, COLOURS[6]))
        )  # fmt: skip
        if label:
            parts.append(text(*label, name, class_="label"))
    return parts

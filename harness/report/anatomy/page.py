"""The anatomy of one run as a self-contained HTML page, and its charts as SVG files. No torch."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from harness.memory.memory_breakdown import Kept, Lump, MemoryBreakdown, OpCost
from harness.report.anatomy import charts
from harness.report.data.grid import Column, tabulate
from harness.report.figures import units
from harness.report.rendering.parts import HEAD, STYLE, colour_keys, section, table, tag
from harness.report.rendering.svg import element, text

AGREE = 0.03
"""Relative difference allowed between the two counts of activations.

Tensors that Python holds (the model's output, the batch) are alive, but autograd did not save
them.
"""
SAME = 0.005
"""Relative change of the peak up to which the hooks count as having no effect."""
PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "convolution", "_scaled_dot", "_flash", "_efficient")
"""Prefixes of the operations that the rule of 6 N D counts."""
ROWS = 24
"""Rows of a table; further ones are summed up."""
MORE_STYLE = """
svg { font-family: system-ui, "Segoe UI", Roboto, Arial, sans-serif; }
.area { stroke: #fff; stroke-width: 0.4; } .border { stroke: #7d8893; stroke-dasharray: 3 3; }
.mark { fill: none; stroke: var(--ink); stroke-width: 1.8; }
.roof { fill: none; stroke: var(--ink); stroke-width: 1.8; }
.op { fill-opacity: 0.55; stroke: #fff; } .four { display: grid;
grid-template-columns: repeat(4, 1fr); gap: 6px 20px; }
.uneven { display: grid; grid-template-columns: minmax(0, 1.25fr) minmax(0, 1fr); gap: 6px 34px; }
@media screen and (max-width: 860px) { .uneven { grid-template-columns: minmax(0, 1fr); }
  .four { grid-template-columns: 1fr 1fr; } }
"""


def _made_by(lump: Lump) -> str:
    return "before the step" if lump.maker == "before" else charts.short_op(lump.maker)


LUMPS = (
    Column("Category", lambda r: units.title(r.category)),
    Column("Made by", _made_by),
    Column("In module", lambda r: r.module or "outside the model"),
    Column("Tensors", lambda r: r.count, "count"),
    Column("MiB", lambda r: r.bytes, "mib"),
)
KEPT = (
    Column("Module", lambda r: r.module or "outside the model (batch, loss)"),
    Column("Of this name", lambda r: r.count, "count"),
    Column("Made here and kept MiB", lambda r: r.made, "mib"),
    Column("Saved here for backward MiB", lambda r: r.saved, "mib"),
)
OPS = (
    Column("Operation", lambda r: r[0].op),
    Column("Phase", lambda r: r[0].phase),
    Column("Calls", lambda r: r[0].calls, "count"),
    Column("Time %", lambda r: r[1], "percent"),
    Column("GFLOP", lambda r: r[0].flops, "giga"),
    Column("MiB moved", lambda r: r[0].bytes, "mib"),
    Column("FLOPs a byte", lambda r: charts.intensity(r[0]), "ratio"),
    Column("% of the roof", lambda r: r[2], "percent"),
)


def render(breakdown: MemoryBreakdown) -> str:
    """Return the whole page."""
    title = f"Headroom: anatomy of {breakdown.recipe}"
    style = STYLE.read_text(encoding="utf-8") + MORE_STYLE
    parts = [HEAD, f"<title>{escape(title)}</title><style>{style}</style></head><body>"]
    parts += [
        tag("h1", title),
        tag("p", _setting(breakdown), "sub"),
        tag("p", _stamp(breakdown), "stamp cpu"),
    ]
    body = [_answers(breakdown), _step(breakdown), _modules(breakdown), _laws(breakdown)]
    body = [part.replace(" %", "\u00a0%") for part in [*body, _ops(breakdown)]]
    return "\n".join([*parts, *body, "</body></html>\n"])


def _setting(p: MemoryBreakdown) -> str:
    ranks = f"rank 0 of a simulated {p.world}" if p.world else f"rank 0 of {p.processes}"
    return (
        f"{p.model} ({p.parameters / 1e6:.1f} M parameters, {p.tokens} tokens a sample), global "
        f"batch {p.global_batch}, micro batch {p.micro_batch}, {p.dtype}, {ranks} on {p.device}."
    )


def _stamp(p: MemoryBreakdown) -> str:
    where = (
        "host memory stands in for a GPU's, and attention is the CPU's kernel. "
        if p.device == "cpu"
        else ""
    )
    return (
        "Bytes are those of tensors, followed one by one through an extra step after the measured "
        f"ones; {where}What the allocator rounds up or keeps in reserve is not in them."
    )


def _mib(size: float) -> str:
    return f"{size / units.MIB:.1f} MiB"


def sentences(p: MemoryBreakdown) -> list[tuple[str, str, str]]:
    """Return (question, answer, details) for a reader's first questions."""
    line, alone = p.timeline, sum(p.inference_alone.values())
    sizes = [(size, units.title(name), name) for name, size in line.at_peak().items()]
    alive = ", ".join(
        f"{units.in_sentence(name)} {100 * size / line.peak_bytes:.0f} %"
        for size, _, name in sorted(sizes, reverse=True)
        if size > 0.005 * line.peak_bytes
    )
    where = f" in {line.peak_module}" if line.peak_module else ""
    site = f" ({line.peak_site})" if line.peak_site else ""
    return [
        ("Peak of a step", f"{_mib(line.peak_bytes)} in phase {line.peak_phase}",
         f"{alive}. The last allocation before it is by {charts.short_op(line.peak_maker)}"
         f"{where}{site}"),
        ("Training against inference",
         f"{line.peak_bytes / alone:.1f} times the memory",
         f"without gradients, the same micro batch peaks at {_mib(alone)} if only weights are "
         f"kept, and at {_mib(p.inference.peak_bytes)} if optimizer state and EMA are kept too"),
        ("Two counts of the activations", _agreement(p), _difference(p)),
        ("Effect of the recording on the peak", _recording(p),
         "a step with hooks on modules and saved tensors, against a step without"),
    ]  # fmt: skip


def agrees(p: MemoryBreakdown) -> bool:
    """Return True if the trace and autograd count the same activations."""
    return _apart(p) <= AGREE


def _apart(p: MemoryBreakdown) -> float:
    return abs(p.made_total - p.saved_total) / max(p.made_total, p.saved_total, 1)


def _agreement(p: MemoryBreakdown) -> str:
    if agrees(p):
        return f"agree within {100 * _apart(p):.1f} %"
    return f"DISAGREE by {100 * _apart(p):.1f} %"


def _difference(p: MemoryBreakdown) -> str:
    return (
        f"the trace counts {_mib(p.made_total)} that forward made and that are alive when backward "
        f"begins; autograd's hooks count {_mib(p.saved_total)} that it saved. The batch and the "
        "model's output are alive without being saved"
    )


def _recording(p: MemoryBreakdown) -> str:
    """Return the effect of the recording hooks on the peak."""
    off = p.timeline.peak_bytes / p.step_peak_bytes - 1
    return f"{'nothing' if abs(off) <= SAME else 'the peak'} ({100 * off:+.2f} %)"


def _answers(p: MemoryBreakdown) -> str:
    items = "".join(
        f"<dt>{escape(q)}</dt><dd><b>{escape(a)}</b>{escape(m)}</dd>" for q, a, m in sentences(p)
    )
    return f'<dl class="answers">{items}</dl>'


def _figure(caption: str, small: str, picture: str, keys: str = "") -> str:
    head = f"<figcaption>{escape(caption)}<small>{escape(small)}</small></figcaption>"
    return f"<figure>{head}{keys}{picture}</figure>"


def _step(p: MemoryBreakdown) -> str:
    keys = colour_keys(charts.keys())
    line = _figure("Memory over one step", "each sample is the fullest instant since the last",
                   charts.timeline(p.timeline), keys)  # fmt: skip
    lumps = table(tabulate("lumps", "", LUMPS, p.lumps))
    bars = _figure("Training against inference", "one micro batch", charts.bars(p), keys)
    both = f'<div class="uneven"><div><h3>What lived at the peak</h3>{lumps}</div>{bars}</div>'
    return section("step", "One step", line, both)


def _modules(p: MemoryBreakdown) -> str:
    shown = p.kept[:ROWS]
    rest = p.kept[ROWS:]
    if rest:
        more = Kept(
            module=f"{len(rest)} smaller", count=sum(r.count for r in rest),
            made=sum(r.made for r in rest), saved=sum(r.saved for r in rest),
        )  # fmt: skip
        shown = [*shown, more]
    whole = Kept(
        module="all", count=sum(r.count for r in p.kept), made=p.made_total, saved=p.saved_total
    )
    note = tag(
        "p",
        "When the first backward begins. Made here and kept: storages that an operation of this "
        "module made, alive then (allocation trace). Saved here: what autograd saved while this "
        "module ran, each storage once, at the module that saved it first (saved-tensors hooks). "
        "A tensor made in one module is often saved by the next, so rows differ and sums agree. "
        "* stands for every block.",
        "note",
    )
    return section(
        "modules", "Activations by module", table(tabulate("kept", "", KEPT, [*shown, whole])), note
    )


def _laws(p: MemoryBreakdown) -> str:
    """Return the laws of a DiT; empty for other models, which have no small measured ones."""
    if not p.points:
        return ""
    law = charts.fit(p.points)
    own = law(p.micro_batch, p.tokens, p.hidden, p.depth)
    formula = (
        f"Activation bytes = B x D x ({law.block:.1f} x T x L + {law.ends:.1f} x T + "
        f"{law.sample:.1f} x L): {law.block:.1f} bytes a token, hidden unit and block. Largest "
        f"error on the points (dots; the line is the law): {100 * law.worst:.1f} %. For this run's "
        f"size it gives {_mib(own)}; "
        f"this run kept {_mib(p.made_total)} (a recipe that recomputes or edits activations keeps "
        "fewer)."
    )
    small = "".join(
        _figure(f"Against {name}", "", charts.sweep(p.points, key, law))
        for key, (_, name) in charts.SWEEPS.items()
    )
    errors = [charts.six_nd_error(q.parameters, q.batch * q.tokens, q.flops) for q in p.points]
    text = (
        f"On the same small models, 6 N D counts {100 * min(errors):.0f} % to "
        f"{100 * max(errors):.0f} % too many FLOPs. A third of a DiT block's weights "
        "(adaLN) runs once a sample, not once a token. The report's FLOPs are from the "
        "closed form, not from 6 N D."
    ) + _six_nd_here(p)
    six = _figure(
        "The rule of 6 N D on DiT presets",
        "closed form of each preset, 32x32 latents",
        charts.preset_chart(),
        colour_keys(charts.family_keys()),
    )
    body = f'<div class="charts">{six}<div>{tag("p", text)}</div></div>'
    return section("laws", "Laws", tag("p", formula), f'<div class="four">{small}</div>', body)


def _six_nd_here(p: MemoryBreakdown) -> str:
    """Return the rule's error on this run's model, if its forward FLOPs were counted."""
    products = sum(c.flops for c in p.ops if c.phase == "forward" and c.op.startswith(PRODUCTS))
    if not products:
        return ""
    tokens = p.global_batch // (p.world or p.processes) * p.tokens
    error = charts.six_nd_error(p.parameters, tokens, 3 * products)
    return (
        f" This run: {6 * p.parameters * tokens / 1e9:.1f} GFLOP by the rule, "
        f"{3 * products / 1e9:.1f} counted (three times the products of forward): "
        f"{100 * error:+.0f} %."
    )


def _ops(p: MemoryBreakdown) -> str:
    note = (
        f"Ceilings {'of the calibration' if p.ceilings else 'measured here'}: "
        f"{p.peak_flops / 1e9:.0f} GFLOP/s ({p.dtype} products), "
        f"{p.bandwidth / 1e9:.1f} GB/s (copies); the ridge is at "
        f"{p.peak_flops / p.bandwidth:.1f} FLOPs a byte. A circle's area is its share of the time. "
        "Bytes are operands and results once each, so what stays in cache can lie above the roof. "
        f"{p.ceilings}"
    )
    small = f"the {charts.SHOWN_OPS} operations of a step that take longest and have FLOPs"
    keys = colour_keys(charts.phase_keys())
    picture = _figure("Roofline of this device", small, charts.roofline(p), keys)
    rest = sum(c.seconds for c in p.ops[ROWS:]) / (sum(c.seconds for c in p.ops) or 1.0)
    more = f"{len(p.ops) - ROWS} more operations take {100 * rest:.1f} % of the time."
    return section(
        "ops",
        "Operations",
        picture,
        tag("p", note, "note"),
        table(tabulate("ops", "", OPS, _op_rows(p))),
        tag("p", more, "note") if p.ops[ROWS:] else "",
    )


def _op_rows(p: MemoryBreakdown) -> list[tuple[OpCost, float, float]]:
    whole = sum(c.seconds for c in p.ops) or 1.0
    rows = []
    for cost in p.ops[:ROWS]:
        roof = charts.attainable(charts.intensity(cost), p.peak_flops, p.bandwidth)
        reached = cost.flops / cost.seconds / roof if cost.seconds and roof else 0.0
        rows.append((cost, cost.seconds / whole, reached))
    return rows


# ---- files ----
# The page, and each chart as a standalone SVG.


FONT = 'font-family="system-ui, Segoe UI, Roboto, Arial, sans-serif"'
TOP = 46.0
"""Height above a drawing for its title and legend."""
Keys = list[tuple[str, str]]
"""Name and colour of each entry of a legend."""


def write(breakdown: MemoryBreakdown, folder: Path) -> list[Path]:
    """Write the page and the charts, and return their paths."""
    texts = {"anatomy.html": render(breakdown), **charts_of(breakdown)}
    for name, content in texts.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in texts]


def charts_of(breakdown: MemoryBreakdown) -> dict[str, str]:
    """Return file name -> SVG of each chart, with its title, legend and colours."""
    pictures: dict[str, tuple[str, Keys]] = {
        "timeline.svg": (charts.timeline(breakdown.timeline), charts.keys()),
        "inference.svg": (charts.bars(breakdown), charts.keys()),
        "roofline.svg": (charts.roofline(breakdown), charts.phase_keys()),
    }
    if breakdown.points:  # only a DiT has laws
        pictures["six_nd.svg"] = (charts.preset_chart(), charts.family_keys())
        law = charts.fit(breakdown.points)
        for varies in charts.SWEEPS:
            pictures[f"activations_{varies}.svg"] = (
                charts.sweep(breakdown.points, varies, law),
                [],
            )
    return {
        name: standalone(picture, keys) for name, (picture, keys) in pictures.items() if picture
    }


def standalone(picture: str, keys: Keys) -> str:
    """Return a drawing as its own file, with style sheet and legend inside."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture)
    title = re.search(r"<title>(.*?)</title>", picture)
    width, height = float(box[1]), float(box[2])
    top = TOP if keys else TOP / 2
    heading = f'<text x="4" y="16" font-size="14" font-weight="600">{title[1]}</text>'
    inner = picture.replace("<svg ", f'<svg y="{top:g}" width="{width:g}" height="{height:g}" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height + top:g}" '
        f'width="{width:g}" height="{height + top:g}" font-size="11" {FONT}>'
        f"<style>{_style(picture)}</style>"
        f'<rect width="{width:g}" height="{height + top:g}" fill="#fff"/>'
        f"{heading}{_legend(keys)}{inner}</svg>\n"
    )


def _legend(keys: Keys) -> str:
    parts, left = [], 4.0
    for name, colour in keys:
        parts.append(element("rect", x=left, y=26, width=11, height=11, fill=colour))
        parts.append(text(left + 16, 35, name, class_="axis"))
        left += 34 + 6.2 * len(name)
    return "".join(parts)


def _style(picture: str) -> str:
    """Return the page's rules that the drawing uses, with colours as literals."""
    sheet = STYLE.read_text(encoding="utf-8") + MORE_STYLE
    colours = dict(re.findall(r"(--[a-z]+): *(#[0-9a-f]+)", sheet))
    words = " ".join(re.findall(r'class="([^"]+)"', picture)).split()
    used = {f".{word}" for word in [*words, "axis"]}
    rules = []
    for selector, body in re.findall(r"([^{}@]+)\{([^{}]*)\}", sheet):
        names = {name.strip() for name in selector.split(",")}
        if names == {"svg text"} or any(set(re.findall(r"\.[\w-]+", n)) & used for n in names):
            rules.append(f"{selector.strip()}{{{' '.join(body.split())}}}")
    return re.sub(r"var\((--[a-z]+)\)", lambda match: colours[match[1]], "".join(rules))

"""The report as one self-contained HTML file, which opens from disk, prints, and reads without
JavaScript.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from harness.report.data import answers, lookup
from harness.report.data.answers import MANY, in_full
from harness.report.data.grid import Grid, text_grid
from harness.report.data.rows import Group, Report, Row, label
from harness.report.figures import parity, units
from harness.report.rendering import charts, sentences, tables
from harness.report.rendering.explanations import GLOSSARY, MEMORY_ONLY_NOTE, RECORDED_NOTE
from harness.report.rendering.svg import element
from strategies.evidence.rules import worded

SHOWN = (
    *("types", "parity", "drawn", "siblings", "memory", "host", "predicted", "parts", "calibrated"),
    *("buckets", "gathers"),
)
"""Keys of the tables below the charts of a group, in order."""
CROWD = 8
"""Number of rows above which some marks of the scatter may show only their rank."""
HEAD = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
)
STYLE = Path(__file__).with_name("page.css")
SCRIPT = Path(__file__).with_name("page.js")
"""Sorts, filters and pages tables, and copies commands; every row is there without it.

Own code, because a table library (Tabulator: 100 kB packed) would be in every report.
"""


def render(report: Report) -> str:
    """Return the whole page."""
    name = report.suite.name or "report"
    title = escape(f"Headroom: {name}")
    parts = [HEAD, f"<title>{title}</title>", f"<style>{STYLE.read_text(encoding='utf-8')}</style>"]
    parts += ["</head><body>", tag("h1", f"Headroom: {name}")]
    several = len(report.groups) > 1
    parts += [_headline(report.groups[0]) if report.groups and not several else ""]
    parts += [_under_title(report)]
    groups = in_full(report.groups)
    for index, (group, shown) in enumerate(groups):
        parts.append(_group(group, shown, index, several))
    parts += [_others(report, len(groups)), _memory_only(report), _recorded(report)]
    parts += [_unfinished(report), _skipped(report), _environment(report)]
    parts += [_commands(report), _how_to_read(report)]
    script = f"<script>\n{SCRIPT.read_text(encoding='utf-8')}</script>"
    return "\n".join([*(part for part in parts if part), script, "</body></html>\n"])


def _under_title(report: Report) -> str:
    when = report.suite.started.replace("T", " ").replace("+00:00", " UTC")
    started = f" Started {escape(when)}." if when else ""
    more = ""
    if report.unfinished:
        more = ' <a href="#unfinished">What did not finish, and why.</a>'
    fits = sentences.predicted_fits(report)
    fits = f"<br>{escape(fits)}" if fits else ""
    return f'<p class="sub">{escape(sentences.summary(report))}{started}{more}{fits}</p>'


def _others(report: Report, first: int) -> str:
    """Return the rows of the groups that are not shown in full."""
    text = sentences.others(report, first)
    if not text:
        return ""
    kind = "warn" if sentences.others_wrong(report, first) else "note"
    grid = tables.others(report.groups, first)
    return section("others", grid.title, tag("p", text, kind), table(grid))


# ---- groups ----


def _group(group: Group, shown: Group, index: int, several: bool) -> str:
    grids = tables.group_grids(shown)
    parts = [_head(group, index, several), _front(group, shown)]
    reference = f"{grids['ranking'].title}<small> against {escape(_reference(group))}</small>"
    floor = tag("p", lookup.noise_floor(group), "sub") if lookup.noise_floor(group) else ""
    parts.append(f"<h3>{reference}</h3>{floor}{table(tables.ranking(group))}")
    parts.append(tag("p", sentences.detailed(group, shown), "note") if shown is not group else "")
    phases = grids["phases"]
    warm = tag("h3", phases.title) + table(phases, heat=True) if phases.lines else ""
    parts += [_notes(group), _bars_and_steps(shown), warm, _curves(shown)]
    parts += [_titled(grids["effects"]) if grids["effects"].lines else "", _titled(grids["time"])]
    introductions = {"predicted": sentences.prediction_errors, "calibrated": sentences.calibration}
    for key in SHOWN:
        if grids[key].lines:
            introduced = introductions.get(key)
            parts.append(_titled(grids[key], introduced(shown) if introduced else ""))
    evidence = [tag("h3", "Evidence and audit"), *map(_evidence, shown.rows)]
    return "\n".join([*parts, *evidence])


def _reference(group: Group) -> str:
    """Return the reference row, and the requested one that it replaces."""
    return group.reference.label + (f", in place of {group.asked}" if group.asked else "")


def _titled(grid: Grid, intro: str = "") -> str:
    """Return a table below its title and a sentence; a folded one is collapsed."""
    if grid.folded:
        title = f"{escape(grid.title)}<small>{len(grid.lines)} values</small>"
        return f"<details><summary>{title}</summary>{table(grid)}</details>"
    return tag("h3", grid.title) + (tag("p", intro) if intro else "") + table(grid)


def _head(group: Group, index: int, several: bool) -> str:
    parts = [f"<h2>Group {index + 1}: {escape(group.device)}</h2>"] if several else []
    parts += [_headline(group)] if several else []
    parts.append(tag("p", sentences.setting(group), "sub"))
    if group.unlike:
        parts.append(tag("p", f"Not ranked with group 1: {group.unlike}.", "warn mild"))
    kind = "stamp" if group.meter == "cuda" else "stamp cpu"
    parts.append(tag("p", sentences.stamp(group), kind))
    return "\n".join([*parts, *(tag("p", text, "warn") for text in sentences.errors(group))])


def _headline(group: Group) -> str:
    text = answers.headline(group)
    return tag("p", text, "headline") if text else ""


def _notes(group: Group) -> str:
    """Return what a reader may want to know of the rows, collapsed; errors are above."""
    texts = sentences.notes(group)
    if not texts:
        return ""
    lines = "".join(tag("li", text) for text in texts)
    count = f"{len(texts)} note{'s' * (len(texts) > 1)} on these rows"
    return f"<details><summary>{count}</summary><ul>{lines}</ul></details>"


def _front(group: Group, shown: Group) -> str:
    """Return the scatter beside the answers."""
    note = "filled: Pareto front, ring: reference. Up and left is better"
    note += "; a number is a line of the ranking" if len(shown.rows) > CROWD else ""
    picture = "" if group.world else charts.scatter(shown)
    left = figure("Memory against throughput", note, picture)
    return _charts(left, f"<div>{_answers(group)}{_fits(group)}</div>")


def _answers(group: Group) -> str:
    items = []
    for answer in answers.answers(group):
        name = f"<b>{_breakable(answer.row.label)}</b>" if answer.row else ""
        items.append(f"<dt>{escape(answer.question)}</dt><dd>{name}{escape(answer.text)}</dd>")
    return f'<dl class="answers">{"".join(items)}</dl>' if items else ""


def _fits(group: Group) -> str:
    lines = [
        [fit.sizes, f"{fit.row.label}{fit.others}" if fit.row else "nothing measured", rate, need]
        for fit, rate, need in tables.fits(group)
    ]
    kinds = {"With GiB a device": "count", "Fastest that fits": "text"}
    kinds |= {"Samples/s": "rate", "Needs GiB": "gib"}
    return table(text_grid("fits", "", kinds, lines)) if lines else ""


def _bars_and_steps(group: Group) -> str:
    bars = charts.split_bars(group)
    keys = colour_keys(charts.split_legend(group))
    left = figure("Memory at the peak", "one step, on the fullest rank", bars, keys)
    note = "dots: every timed step, bar: p10 to p90, tick: median"
    note += "; band: noise floor about the reference" if group.floor else ""
    return _charts(left, figure("Step times", note, charts.steps(group)))


def _curves(group: Group) -> str:
    instead = f" ({_reference(group)})" if group.asked else ""
    loss = figure("Loss", f"the reference{instead} is the broad line", charts.curves(group))
    away = figure(
        f"Distance of the loss to the reference{instead}",
        "dashed: limit of exact rows; at the foot: identical",
        charts.distances(group),
    )
    return _charts(loss, away) + (_line_keys(charts.legend(group)) if loss else "")


def _evidence(row: Row) -> str:
    """Return a row's evidence and audit, collapsed."""
    checks = row.first.audit
    held = sum(check.ok for check in checks)
    summary = f"<summary>{escape(row.label)}<small>{held} of {len(checks)} checks hold</small>"
    lines = [[name, _plain(worded(facts))] for name, facts in row.first.evidence.items()]
    pair = _facts(["Strategy", "Read back"], lines) + _audit(checks)
    return f'<details>{summary}</summary><div class="pair">{pair}</div></details>'


def _audit(checks: Sequence[Any]) -> str:
    lines = [
        [c.name, _plain(c.asked), _plain(c.found) + ("" if c.ok else " (does not hold)")]
        for c in checks
    ]
    marks = [() if check.ok else ("alarm",) for check in checks]
    return _facts(["Audit", "Asked", "Found"], lines, marks)


def _facts(heads: list[str], lines: list[list[str]], marks: Sequence[tuple[str, ...]] = ()) -> str:
    grid = text_grid("facts", "", dict.fromkeys(heads, "text"), lines)
    return table(dataclasses.replace(grid, marks=list(marks) or grid.marks))


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    return value if isinstance(value, str) else json.dumps(value, default=str)


# ---- after the groups ----


def _memory_only(report: Report) -> str:
    if not report.memory_only:
        return ""
    grid = tables.memory_only(report)
    return section("memory-only", grid.title, tag("p", MEMORY_ONLY_NOTE, "note"), table(grid))


def _recorded(report: Report) -> str:
    if not report.recorded:
        return ""
    parts = [tag("p", RECORDED_NOTE, "note")]
    for result in report.recorded[:MANY]:
        files = "<br>".join(f"<code>{escape(str(name))}</code>" for name in result.recordings)
        parts += [tag("h3", label(result.spec)), f"<p>{files}</p>"]
        if result.key_averages:
            parts.append(table(tables.averages(result)))
    parts += [tag("p", line) for line in sentences.more_recorded(report)]
    return section("recorded", "Recorded runs, not ranked", *parts)


def _unfinished(report: Report) -> str:
    if not report.unfinished:
        return ""
    listed = report.unfinished[:MANY]
    grid = table(tables.unfinished_grid(listed))
    if left := sentences.left_out(len(listed), len(report.unfinished)):
        grid += tag("p", left, "note")
    logs = [
        f"<details><summary>{escape(unfinished.label)}<small>end of its log</small></summary>"
        f"<pre>{escape(unfinished.result.log_tail)}</pre></details>"
        for unfinished in listed
        if unfinished.result.log_tail
    ]
    audits = [
        f"<details><summary>{escape(unfinished.label)}<small>audit</small></summary>"
        f'<div class="pair">{_audit(unfinished.result.audit)}</div></details>'
        for unfinished in listed
        if unfinished.result.audit
    ]
    return section("unfinished", "Did not finish", grid, *logs, *audits)


def _skipped(report: Report) -> str:
    lines = sentences.first_of(report.skipped, "skipped files")
    parts = [tag("p", line, "warn mild") for line in lines]
    return section("skipped", "Files skipped", *parts) if parts else ""


def _environment(report: Report) -> str:
    """Return machine and software facts of each shown group, once if they are equal."""
    shown = in_full(report.groups)
    found = dict.fromkeys(_machine(lookup.environment(group.rows)) for group, _ in shown)
    blocks = [block for block in found if block]
    return section("environment", "Environment", "<hr>".join(blocks)) if blocks else ""


def _machine(facts: dict[str, list[str]]) -> str:
    items = []
    for name, values in facts.items():
        title = name.removeprefix("versions.").replace("_bytes", " memory").replace("_", " ")
        title = "memory" if name == "memory_bytes" else title
        text = lookup.listed(values)
        items.append(f"<div><span>{escape(title)}</span>{escape(text)}</div>")
    return f'<div class="facts">{"".join(items)}</div>' if items else ""


def _commands(report: Report) -> str:
    """Return each row's exact command, to run from the repository's root."""
    shown = [row for _, group in in_full(report.groups) for row in group.rows]
    every = [(row.label, row.first.command) for row in shown]
    unfinished = report.unfinished[:MANY]
    every += [(f"{u.label} ({u.status.value})", u.result.command) for u in unfinished]
    blocks = [
        f'<div class="command"><p>{escape(name)}</p><pre>{escape(command)}</pre>'
        '<button type="button" hidden>Copy</button></div>'
        for name, command in every
        if command
    ]
    note = tag("p", "Command of each row, to run it alone from the repository's root.", "note")
    return section("commands", "Commands", note, *blocks) if blocks else ""


def _how_to_read(report: Report) -> str:
    if not report.groups:
        return ""
    items = [f"<div><dt>{escape(n)}</dt><dd>{escape(text)}</dd></div>" for n, text in GLOSSARY]
    note = "GiB = 2^30 bytes. A dash means: not defined. Other words: docs/glossary.md."
    listed = f'<dl class="read">{"".join(items)}</dl>'
    return section("read", "Reading this page", listed, tag("p", note, "note"))


# ---- parts of a page ----


def tag(name: str, text: str, classes: str = "") -> str:
    """Return an element around plain text."""
    return f"<{name}{_class(classes)}>{escape(text)}</{name}>"


def section(key: str, title: str, *parts: str) -> str:
    """Return a section with a heading to link to."""
    return "\n".join([f'<h2 id="{key}">{escape(title)}</h2>', *(p for p in parts if p)])


def figure(caption: str, small: str, picture: str, keys: str = "") -> str:
    """Return a picture below its caption, small print and legend; empty without a picture."""
    if not picture:
        return ""
    note = f"<small>{escape(small)}</small>" if small else ""
    return f"<figure><figcaption>{escape(caption)}{note}</figcaption>{keys}{picture}</figure>"


def _charts(*figures: str) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


def colour_keys(keys: Sequence[tuple[str, str]]) -> str:
    """Return a legend of coloured squares."""
    items = [f'<li><i style="background:{colour}"></i>{escape(n)}</li>' for n, colour in keys]
    return f'<ul class="keys">{"".join(items)}</ul>'


def _line_keys(keys: Sequence[tuple[str, str, str]]) -> str:
    """Return a legend of coloured, dashed lines."""
    items = []
    for name, colour, dash in keys:
        ends: dict[str, Any] = {"x1": 0, "x2": 26, "y1": 4, "y2": 4, "stroke": colour}
        line = element("line", **ends, stroke_width=2.4, stroke_dasharray=dash or None)
        items.append(
            f'<li><svg viewBox="0 0 26 8" aria-hidden="true">{line}</svg>{escape(name)}</li>'
        )
    return f'<ul class="keys">{"".join(items)}</ul>'


# ---- tables ----


LONG = 40
"""Characters of text from which a cell is broken into lines."""
NAMES = ("Recipe", "Fastest that fits", "Adding", "Status")
"""Heads of columns of names, which break only between parts."""
PAGE = 50
"""Rows on a page of a table with more than ``MANY`` rows."""
KINDS = {"text": "t", "flag": "t flag"}
"""Kind of a column -> the classes of its cells."""
PILLS = {"reference": "", "front": "front", "noisy": "noisy"}
PILLS |= dict.fromkeys(parity.WRONG, "alarm")
"""Flag in a frame of its own -> its class."""


def table(grid: Grid, *, heat: bool = False) -> str:
    """Return a table; ``heat`` fills numeric cells in proportion to the table's largest value."""
    top = max((_value(c) for line in grid.lines for c in line[1:]), default=0.0) if heat else 0.0
    columns = list(zip(grid.heads, grid.kinds, strict=True))
    detail = {head: "detail" for head in grid.details}
    head = "".join(  # a long name may break after an underscore
        f"<th{_class(detail.get(h), KINDS.get(k))}>{escape(h).replace('_', '_<wbr>')}</th>"
        for h, k in columns
    )
    body = []
    for line, marks in zip(grid.lines, grid.marks, strict=True):
        cells = [
            _cell(c, h, k, top, detail.get(h)) for c, (h, k) in zip(line, columns, strict=True)
        ]
        body.append(f"<tr{_class(*marks)}>{''.join(cells)}</tr>")
    below = tag("p", grid.note, "note") if grid.note else ""
    rows = "\n".join(body)
    paged = f' data-rows="{PAGE}"' if len(grid.lines) > MANY else ""
    switch = ""
    if grid.details:  # the checkbox shows the details of the table after it, without JavaScript
        words = f"All {len(grid.heads)} columns"
        switch = f'<label class="switch"><input type="checkbox"> {words}</label>'
    return (
        f'{switch}<div class="wide"><table data-key="{grid.key}"{paged}><thead><tr>{head}'
        f"</tr></thead>\n<tbody>{rows}</tbody></table></div>{below}"
    )


def _class(*words: str | None) -> str:
    names = " ".join(filter(None, words))
    return f' class="{names}"' if names else ""


def _cell(text: str, head: str, kind: str, top: float, detail: str | None) -> str:
    """Return a cell with its column's head, which a narrow page shows beside it.

    Narrow pages stack the cells of a row and leave out empty ones.
    """
    long = "long" if kind in units.TEXT and len(text) > LONG else None
    look, inner, style = [KINDS.get(kind), long], escape(text), ""
    if kind == "flag":
        inner = _pills(text)
    elif head in NAMES:
        look, inner = [*look, "name"], _breakable(text)
    elif parity.alarming(text):
        look.append("bad")
    elif top and kind == "gib" and text != units.NONE:
        look, style = ["heat"], f' style="--share:{100 * _value(text) / top:.0f}%"'
    alone = head in NAMES[:3] or text in ("", units.NONE)
    shown = "" if alone else f' data-head="{escape(head)}"'
    classes = _class(detail, *look)
    attributes = f"{shown}{classes}" if any(look) else f"{classes}{shown}"
    return f"<td{attributes}{style}>{inner}</td>"


def _breakable(recipe: str) -> str:
    """Return a recipe that may break after a part or its name."""
    return escape(recipe).replace("+", "+<wbr>").replace(":", ":<wbr>")


def _pills(cell: str) -> str:
    """Return flags, the known ones in a frame each."""
    words = [w for w in cell.split(", ") if w and w != units.NONE]
    return ", ".join(
        f'<span class="pill {PILLS[w]}">{w}</span>' if w in PILLS else escape(w) for w in words
    )


def _value(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return 0.0

"""The report as one self-contained HTML file, which opens from disk, prints, and reads without
JavaScript.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from harness.report.data import answers, lookup
from harness.report.data.answers import MANY, fastest_that_fits, in_full
from harness.report.data.grid import Grid, text_grid
from harness.report.data.rows import Group, Report
from harness.report.figures import units
from harness.report.rendering import analyses, charts, extra_tables, sentences, tables
from harness.report.rendering import parts as html_parts
from harness.report.rendering.parts import HEAD, STYLE, section, tag

SHOWN = (
    *("types", "parity", "drawn", "siblings", "memory", "host", "predicted", "parts", "calibrated"),
    "buckets",
    "gathers",
)
"""Keys of the tables below the charts of a group, in order."""
CROWD = 8
"""Number of rows above which some marks of the scatter may show only their rank."""
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
    parts.append(_under_title(report))
    parts.append(_story(report))
    groups = in_full(report.groups)
    for index, (group, shown) in enumerate(groups):
        parts.append(_group(group, shown, index, several))
    parts += [
        _others(report, len(groups)),
        extra_tables.html_of_memory_only(report),
        extra_tables.html(report),
        _unfinished(report),
        _skipped(report),
        html_parts.environment(report),
    ]
    parts += [html_parts.commands(report), html_parts.how_to_read(report)]
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


def _story(report: Report) -> str:
    grids = [
        section(f"story-{g.key}", g.title, html_parts.table(g)) for g in analyses.tables(report)
    ]
    figures = [_figure(*picture) for picture in analyses.charts(report)]
    # With an odd number of charts, the legend is beside the last one.
    keys = html_parts.line_keys(analyses.keys(report))
    cells = "".join([*figures, keys]) if figures else ""
    charted = f'<div class="charts">{cells}</div>' if cells else ""
    return "\n".join([*grids, charted])


def _others(report: Report, first: int) -> str:
    """Return the rows of the groups that are not shown in full."""
    text = sentences.others(report, first)
    if not text:
        return ""
    kind = "warn" if sentences.others_wrong(report, first) else "note"
    grid = tables.others(report.groups, first)
    return section("others", grid.title, tag("p", text, kind), html_parts.table(grid))


def _group(group: Group, shown: Group, index: int, several: bool) -> str:
    grids = tables.group_grids(shown)
    parts = [_head(group, index, several), _front(group, shown)]
    reference = f"{grids['ranking'].title}<small> against {escape(_reference(group))}</small>"
    floor = tag("p", lookup.noise_floor(group), "sub") if lookup.noise_floor(group) else ""
    parts.append(f"<h3>{reference}</h3>{floor}{html_parts.table(tables.ranking(group))}")
    parts.append(tag("p", sentences.detailed(group, shown), "note") if shown is not group else "")
    parts += [_notes(group), _bars_and_steps(shown), _phases(grids["phases"]), _curves(shown)]
    parts += [_effects(grids["effects"]), _table(grids["time"], "")]
    for key in SHOWN:
        if grids[key].lines:
            parts.append(_table(grids[key], sentences.introduction(key, shown)))
    return "\n".join([*parts, html_parts.evidence(shown)])


def _reference(group: Group) -> str:
    """Return the reference row, and the requested one that it replaces."""
    return group.reference.label + (f", in place of {group.asked}" if group.asked else "")


def _table(grid: Grid, intro: str) -> str:
    """Return a table below its title and a sentence; a folded one is collapsed."""
    if grid.folded:
        title = f"{escape(grid.title)}<small>{len(grid.lines)} values</small>"
        return f"<details><summary>{title}</summary>{html_parts.table(grid)}</details>"
    head = tag("h3", grid.title) + (tag("p", intro) if intro else "")
    return head + html_parts.table(grid)


def _head(group: Group, index: int, several: bool) -> str:
    parts = [f"<h2>Group {index + 1}: {escape(group.device)}</h2>"] if several else []
    parts += [_headline(group)] if several else []
    parts.append(tag("p", sentences.setting(group), "sub"))
    if group.unlike:
        parts.append(tag("p", f"Not ranked with group 1: {group.unlike}.", "warn mild"))
    kind = "stamp" if group.meter == "cuda" else "stamp cpu"
    parts.append(tag("p", sentences.stamp(group), kind))
    red = [tag("p", text, "warn") for text in sentences.errors(group)]
    return "\n".join([*parts, *red])


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
    picture = "" if group.world else charts.scatter(shown)
    left = _figure("Memory against throughput", _scatter_note(shown), picture)
    return f'<div class="charts">{left}<div>{_answers(group)}{_fits(group)}</div></div>'


def _answers(group: Group) -> str:
    items = []
    for answer in answers.answers(group):
        name = html_parts.breakable(answer.row.label, "b") if answer.row else ""
        items.append(f"<dt>{escape(answer.question)}</dt><dd>{name}{escape(answer.text)}</dd>")
    return f'<dl class="answers">{"".join(items)}</dl>' if items else ""


def _fits(group: Group) -> str:
    fits = fastest_that_fits(group)
    if not fits:
        return ""
    rates = units.column("rate", [f.row and f.row.numbers.samples_per_second for f in fits])
    needs = units.column("gib", [f.row and f.row.numbers.need_bytes for f in fits])
    lines = [
        [fit.sizes, f"{fit.row.label}{fit.others}" if fit.row else "nothing measured", rate, need]
        for fit, rate, need in zip(fits, rates, needs, strict=True)
    ]
    kinds = {"With GiB a device": "count", "Fastest that fits": "text"}
    kinds |= {"Samples/s": "rate", "Needs GiB": "gib"}
    return html_parts.table(text_grid("fits", "", kinds, lines))


def _figure(caption: str, small: str, picture: str, keys: str = "") -> str:
    if not picture:
        return ""
    note = f"<small>{escape(small)}</small>" if small else ""
    return f"<figure><figcaption>{escape(caption)}{note}</figcaption>{keys}{picture}</figure>"


def _bars_and_steps(group: Group) -> str:
    keys = html_parts.colour_keys(charts.split_legend(group))
    bars = charts.split_bars(group)
    left = _figure("Memory at the peak", "one step, on the fullest rank", bars, keys)
    right = _figure(
        "Step times",
        "dots: every timed step, bar: p10 to p90, tick: median"
        + ("; band: noise floor about the reference" if group.floor else ""),
        charts.steps(group),
    )
    return f'<div class="charts">{left}{right}</div>'


def _effects(grid: Grid) -> str:
    return _table(grid, "") if grid.lines else ""


def _scatter_note(group: Group) -> str:
    note = "filled: Pareto front, ring: reference. Up and left is better"
    return note + ("; a number is a line of the ranking" if len(group.rows) > CROWD else "")


def _phases(grid: Grid) -> str:
    return tag("h3", grid.title) + html_parts.table(grid, heat=True) if grid.lines else ""


def _curves(group: Group) -> str:
    instead = f" ({_reference(group)})" if group.asked else ""
    loss = _figure("Loss", f"the reference{instead} is the broad line", charts.curves(group))
    away = _figure(
        f"Distance of the loss to the reference{instead}",
        "dashed: limit of exact rows; at the foot: identical",
        charts.distances(group),
    )
    keys = html_parts.line_keys(charts.legend(group)) if loss else ""
    return f'<div class="charts">{loss}{away}</div>{keys}'


def _unfinished(report: Report) -> str:
    if not report.unfinished:
        return ""
    listed = report.unfinished[:MANY]
    grid = html_parts.table(tables.unfinished_grid(listed))
    if left := sentences.left_out(len(listed), len(report.unfinished)):
        grid += tag("p", left, "note")
    logs = [
        f"<details><summary>{escape(unfinished.label)}<small>end of its log</small></summary>"
        f"<pre>{escape(unfinished.result.log_tail)}</pre></details>"
        for unfinished in listed
        if unfinished.result.log_tail
    ]
    audits = [html_parts.audit_details(unfinished) for unfinished in listed]
    return section("unfinished", "Did not finish", grid, *logs, *audits)


def _skipped(report: Report) -> str:
    if not report.skipped:
        return ""
    return section(
        "skipped",
        "Files skipped",
        *(
            tag("p", line, "warn mild")
            for line in sentences.first_of(report.skipped, "skipped files")
        ),
    )

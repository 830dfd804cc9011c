"""The report as one self-contained HTML file: opens from disk, prints, reads without JavaScript."""

from __future__ import annotations

from html import escape
from pathlib import Path

from harness.report import (
    charts,
    fit_verdicts,
    html_parts,
    predicted,
    recorded,
    scatter,
    stories,
    table,
    units,
    words,
)
from harness.report.html_parts import section, tag
from harness.report.rows import Group, Report
from harness.report.table import Grid

__all__ = ["render"]

# With more rows than this, some marks of the scatter may only have room for their rank.
CROWD = 8
STYLE = Path(__file__).with_name("page.css")
HEAD = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
)
# Only a comfort: a button that copies a command.
SCRIPT = """<script>
document.querySelectorAll('.command button').forEach(function (b) {
  b.hidden = false;
  b.onclick = function () {
    var pre = b.parentNode.querySelector('pre');
    var done = function () {
      b.textContent = 'Copied'; setTimeout(function () { b.textContent = 'Copy'; }, 1200);
    };
    var pick = function () {
      var range = document.createRange(), chosen = window.getSelection();
      range.selectNodeContents(pre); chosen.removeAllRanges(); chosen.addRange(range);
      if (document.execCommand('copy')) { done(); }
    };
    if (navigator.clipboard) { navigator.clipboard.writeText(pre.textContent).then(done, pick); }
    else { pick(); }
  };
});
</script>"""


def render(report: Report) -> str:
    """The whole page."""
    name = report.suite.name or "report"
    title = escape(f"Headroom: {name}")
    parts = [HEAD, f"<title>{title}</title>", f"<style>{STYLE.read_text(encoding='utf-8')}</style>"]
    parts += ["</head><body>", tag("h1", f"Headroom: {name}"), _under_title(report)]
    parts.append(_story(report))
    several = len(report.groups) > 1
    for index, group in enumerate(report.groups):
        parts.append(_group(group, index, several))
    parts += [
        recorded.html(report),
        _unfinished(report),
        _skipped(report),
        html_parts.environment(report),
    ]
    parts += [html_parts.commands(report), html_parts.how_to_read(report)]
    return "\n".join([*(part for part in parts if part), SCRIPT, "</body></html>\n"])


def _under_title(report: Report) -> str:
    when = report.suite.started.replace("T", " ").replace("+00:00", " UTC")
    started = f" Started {escape(when)}." if when else ""
    more = ""
    if report.unfinished:
        more = ' <a href="#unfinished">What did not finish, and why.</a>'
    verdict = fit_verdicts.summary(report)
    said = f"<br>{escape(verdict)}" if verdict else ""
    return f'<p class="sub">{escape(words.summary(report))}{started}{more}{said}</p>'


def _story(report: Report) -> str:
    grids = [section(f"story-{g.key}", g.title, html_parts.grid(g)) for g in stories.told(report)]
    pictures, keys = stories.drawn(report)
    shown = [_figure(*picture) for picture in pictures]
    # Of an odd number of pictures the last leaves room for the keys beside it.
    cells = "".join([*shown, html_parts.line_keys(keys)]) if shown else ""
    charted = f'<div class="charts">{cells}</div>' if cells else ""
    return "\n".join([*grids, charted])


def _group(group: Group, index: int, several: bool) -> str:
    grids = table.group_grids(group)
    parts = [_head(group, index, several), _answers(group)]
    reference = f"{grids['ranking'].title}<small> against {escape(group.reference.label)}</small>"
    parts.append(f"<h3>{reference}</h3>" + html_parts.grid(grids["ranking"]))
    parts += [_two_charts(group), _phases(grids["phases"]), _curves(group), _time(group, grids)]
    for key in ("types", "parity", "memory", "host", "predicted", "parts", "buckets"):
        if grids[key].lines:
            parts.append(_table(grids[key], predicted.summary(group) if key == "predicted" else ""))
    return "\n".join([*parts, html_parts.evidence(group)])


def _table(grid: Grid, said: str) -> str:
    if grid.folded:
        title = f"{escape(grid.title)}<small>{len(grid.lines)} values</small>"
        return f"<details><summary>{title}</summary>{html_parts.grid(grid)}</details>"
    head = tag("h3", grid.title) + (tag("p", said) if said else "")
    return head + html_parts.grid(grid)


def _head(group: Group, index: int, several: bool) -> str:
    setting = escape(words.setting(group))
    if several:
        parts = [f"<h2>Group {index + 1}: {escape(group.device)}</h2>", f"<p>{setting}</p>"]
    else:
        parts = [f'<p class="sub">{setting}</p>']
    if group.unlike:
        parts.append(tag("p", f"Not ranked with group 1: {group.unlike}.", "warn mild"))
    kind = "stamp" if group.meter == "cuda" else "stamp cpu"
    parts.append(tag("p", words.stamp(group), kind))
    return "\n".join([*parts, _warnings(words.warnings(group))])


def _warnings(texts: list[str]) -> str:
    """What is wrong in red; what is good to know, together, in grey."""
    red = [text for text in texts if text.startswith("DIFFERS")]
    grey = "".join(tag("p", text) for text in texts if text not in red)
    blocks = [tag("p", text, "warn") for text in red]
    return "\n".join(blocks + ([f'<div class="warn mild">{grey}</div>'] if grey else []))


def _answers(group: Group) -> str:
    items = []
    for answer in words.answers(group):
        name = html_parts.breakable(answer.row.label, "b") if answer.row else ""
        items.append(f"<dt>{escape(answer.question)}</dt><dd>{name}{escape(answer.text)}</dd>")
    left = f'<dl class="answers">{"".join(items)}</dl>'
    return f'<div class="top"><div>{left}</div><div>{_fits(group)}</div></div>'


def _fits(group: Group) -> str:
    found = words.fits(group)
    if not found:
        return ""
    rates = units.column("rate", [f.row and f.row.numbers.samples_per_second for f in found])
    needs = units.column("gib", [f.row and f.row.numbers.need_bytes for f in found])
    heads = ["With GiB a device", "Fastest that fits", "Samples/s", "Needs GiB"]
    lines = [
        [f.sizes, f.row.label if f.row else "nothing measured", r, n]
        for f, r, n in zip(found, rates, needs, strict=True)
    ]
    kinds = ["count", "text", "rate", "gib"]
    shown = Grid(
        key="fits", title="", heads=heads, kinds=kinds, lines=lines, marks=[()] * len(lines)
    )
    return html_parts.grid(shown)


def _figure(caption: str, small: str, picture: str, keys: str = "") -> str:
    if not picture:
        return ""
    note = f"<small>{escape(small)}</small>" if small else ""
    return f"<figure><figcaption>{escape(caption)}{note}</figcaption>{keys}{picture}</figure>"


def _two_charts(group: Group) -> str:
    picture = "" if group.world else scatter.scatter(group)
    left = _figure("Memory against throughput", _scatter_note(group), picture)
    keys = html_parts.colour_keys(charts.split_legend())
    bars = charts.split_bars(group)
    right = _figure("What the peak is made of", "one step, on the fullest rank", bars, keys)
    return f'<div class="charts">{left}{right}</div>'


def _scatter_note(group: Group) -> str:
    note = "filled: Pareto front; ring: reference; up and left is better"
    return note + ("; a number is a rank" if len(group.rows) > CROWD else "")


def _phases(grid: Grid) -> str:
    return tag("h3", grid.title) + html_parts.grid(grid, heat=True) if grid.lines else ""


def _curves(group: Group) -> str:
    loss = _figure("Loss", "the reference is the broad line", charts.curves(group))
    away = _figure(
        "Distance of the loss to the reference",
        "dashed: limit of exact rows; at the foot: identical",
        charts.distances(group),
    )
    keys = html_parts.line_keys(charts.legend(group)) if loss else ""
    return f'<div class="charts">{loss}{away}</div>{keys}'


def _time(group: Group, grids: dict[str, Grid]) -> str:
    left = _figure(
        "Step times", "dots: every timed step; bar: p10 to p90; tick: median", charts.steps(group)
    )
    effects = grids["effects"]
    right = ""
    if effects.lines:
        right = f"<figure><figcaption>{effects.title}<small>{escape(effects.note)}</small>"
        right += f"</figcaption>{html_parts.grid(effects, note=False)}</figure>"
    charted = f'<div class="charts">{left}{right}</div>'
    return charted + tag("h3", grids["time"].title) + html_parts.grid(grids["time"])


def _unfinished(report: Report) -> str:
    if not report.unfinished:
        return ""
    shown = html_parts.grid(table.unfinished_grid(report.unfinished))
    logs = [
        f"<details><summary>{escape(gone.label)}<small>end of its log</small></summary>"
        f"<pre>{escape(gone.result.log_tail)}</pre></details>"
        for gone in report.unfinished
        if gone.result.log_tail
    ]
    checks = [html_parts.audit_details(gone) for gone in report.unfinished]
    return section("unfinished", "Did not finish", shown, *logs, *checks)


def _skipped(report: Report) -> str:
    if not report.skipped:
        return ""
    return section(
        "skipped", "Files skipped", *(tag("p", line, "warn mild") for line in report.skipped)
    )

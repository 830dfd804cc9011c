"""The report as HTML and as Markdown: two templates of one content.

``report.html.j2`` is self-contained: it opens from disk, prints, and reads without JavaScript.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.report.data import lookup
from harness.report.data.answers import MANY, answers, headline, in_full
from harness.report.data.grid import Grid
from harness.report.data.rows import Group, Report, Row, label
from harness.report.figures import parity, units
from harness.report.rendering import charts, sentences, tables
from harness.report.rendering.explanations import RECORDED_NOTE
from strategies.evidence.rules import worded
from strategies.files import printable

if TYPE_CHECKING:
    from jinja2 import Environment

NAMES = ("Recipe", "Fastest that fits", "Adding", "Status")
"""Heads of columns of names, which break only between parts."""
LONG = 40
"""Characters of text from which a cell is broken into lines."""


def render_html(report: Report, anatomy: dict[str, Any] | None = None) -> str:
    """Return the whole page as HTML; ``anatomy`` is a section (``harness.report.anatomy``)."""
    told = content(report, drawn=True)
    return _templates().get_template("report.html.j2").render(**told, anatomy=anatomy)


def render_markdown(report: Report) -> str:
    """Return the whole page as Markdown, for GitHub."""
    text = _templates().get_template("report.md.j2").render(**content(report))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@functools.cache
def _templates() -> Environment:
    """Return the templates of this folder; HTML is escaped, Markdown by its own filters."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=lambda name: bool(name) and name.endswith((".html.j2", ".css", ".js")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"plain": plain, "code": code, "md": table_lines, "fenced": fenced}
    made.filters |= {"breakable": _breakable, "heat": _heat, "share": _share}
    made.globals |= {"TEXT": units.TEXT, "NONE": units.NONE, "NAMES": NAMES, "LONG": LONG}
    made.globals |= {"WRONG": parity.WRONG}
    return made


# ---- content ----


def content(report: Report, *, drawn: bool = False) -> dict[str, Any]:
    """Return everything that a page shows; ``drawn`` adds the charts of each group."""
    groups = in_full(report.groups)
    listed = report.unfinished[:MANY]
    return {
        "title": f"Headroom: {report.suite.name or 'report'}",
        "started": report.suite.started.replace("T", " ").replace("+00:00", " UTC"),
        "summary": sentences.summary(report),
        "fits": sentences.predicted_fits(report),
        "groups": [_group(*pair, drawn) for pair in groups],
        "others": sentences.others(report, len(groups)),
        "recorded": [(label(r.spec), r.recordings) for r in report.recorded[:MANY]],
        "recorded_note": RECORDED_NOTE,
        "unfinished": tables.unfinished_grid(listed),
        "unfinished_left": sentences.left_out(len(listed), len(report.unfinished)),
        "logs": [(u.label, printable(u.result.log_tail)) for u in listed if u.result.log_tail],
        "audits": [(u.label, _audit(u.result.audit)) for u in listed if u.result.audit],
        "skipped": sentences.first_of(report.skipped, "skipped files"),
        "environments": list(dict.fromkeys(filter(None, (_machine(g) for g, _ in groups)))),
        "commands": list(_commands(report)),
    }


def _group(group: Group, shown: Group, drawn: bool) -> dict[str, Any]:
    instead = f", in place of {group.asked}" if group.asked else ""
    told = (sentences.prediction_errors(group), sentences.calibration(group))
    return {
        "device": group.device,
        "headline": headline(group),
        "setting": sentences.setting(group),
        "unlike": group.unlike,
        "stamp": sentences.stamp(group),
        "gpu": group.meter == "cuda",
        "errors": sentences.errors(group),
        "answers": [(a.question, a.row.label if a.row else "", a.text) for a in answers(group)],
        "told": [text for text in told if text],
        "fits": tables.fits(group),
        "reference": group.reference.label,
        "instead": instead,
        "floor": lookup.noise_floor(group),
        "ranking": tables.ranking(group),
        "detailed": sentences.detailed(group, shown),
        "notes": sentences.notes(group),
        "tables": tables.group_grids(shown),
        "charts": charts.of_group(shown) if drawn else {},
        "evidence": [_evidence(row) for row in shown.rows] if drawn else [],
    }


def _evidence(row: Row) -> tuple[str, str, list[str]]:
    """Return a row's name, the share of checks that hold, and a line for each fact and check."""
    checks = row.first.audit
    held = f"{sum(check.ok for check in checks)} of {len(checks)} checks hold"
    facts = [f"{name}: {_words(worded(told))}" for name, told in row.first.evidence.items()]
    return row.label, held, [*facts, *_audit(checks)]


def _audit(checks: Sequence[Any]) -> list[str]:
    return [
        f"{c.name}: asked {_words(c.asked)}, found {_words(c.found)}"
        + ("" if c.ok else " (does not hold)")
        for c in checks
    ]


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_words(v)}" for k, v in value.items())
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _machine(group: Group) -> tuple[tuple[str, str], ...]:
    facts = lookup.environment(group.rows)
    return tuple((name, lookup.listed(values)) for name, values in facts.items())


def _commands(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the name and the command of each shown row."""
    for row in (row for _, group in in_full(report.groups) for row in group.rows):
        if row.first.command:
            yield row.label, row.first.command
    for ended in report.unfinished[:MANY]:
        if ended.result.command:
            yield f"{ended.label} ({ended.status.value})", ended.result.command


# ---- filters of the HTML ----


def _breakable(text: str) -> Any:
    """Return a recipe that may break after a part or its name."""
    from markupsafe import Markup, escape

    return Markup(str(escape(text)).replace("+", "+<wbr>").replace(":", ":<wbr>"))


def _heat(grid: Grid) -> float:
    """Return the largest number of a table of bytes."""
    found = [_number(text) for line in grid.lines for text in line[1:]]
    return max((value for value in found if math.isfinite(value)), default=0.0)


def _share(text: str, top: float) -> str:
    return f"{100 * _number(text) / top:.0f}%" if top else "0%"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


# ---- filters of the Markdown ----


def plain(text: str) -> str:
    """Escape text from results (a reason, a name), so that it makes no HTML, link or picture."""
    return printable(text).replace("<", "&lt;").replace("](", "]\\(")


def code(text: str) -> str:
    """Return text as inline code, with its backticks replaced."""
    return f"`{printable(text).replace('`', chr(39))}`"


def fenced(lines: Sequence[str]) -> str:
    """Return a block of shell code that its lines cannot close."""
    longest = max((len(run) for run in re.findall("`+", "\n".join(lines))), default=0)
    ticks = "`" * max(3, longest + 1)
    return "\n".join([f"{ticks}sh", *lines, ticks])


def table_lines(grid: Grid) -> str:
    """Return a table; numbers are right-aligned."""
    rules = ["---" if kind in units.TEXT else "--:" for kind in grid.kinds]
    lines = [f"| {' | '.join(grid.heads)} |", f"|{'|'.join(rules)}|"]
    for cells, marks in zip(grid.lines, grid.marks, strict=True):
        pairs = zip(cells, grid.heads, strict=True)
        texts = (_cell(text, head, "alarm" in marks) for text, head in pairs)
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def _cell(text: str, head: str, alarm: bool) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    if head == "Recipe":
        return code(text)
    text = plain(text)
    return f"**{text}**" if alarm and any(word in text for word in parity.WRONG) else text

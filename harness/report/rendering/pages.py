"""The report as HTML and as Markdown: two templates of one content.

``report.html.j2`` is self-contained: it opens from disk, prints, and reads without JavaScript.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.report.data import lookup
from harness.report.data.answers import answers, headline
from harness.report.data.grid import Grid
from harness.report.data.rows import Group, Report, Row, label
from harness.report.figures import parity, units
from harness.report.rendering import charts, sentences, tables
from harness.report.rendering.sentences import GROUPS, MANY
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
    context = content(report, drawn=True)
    return _templates().get_template("report.html.j2").render(**context, anatomy=anatomy)


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
        autoescape=lambda name: bool(name) and name.endswith((".html.j2", ".css")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"plain": plain, "code": code, "md": table_lines, "fenced": fenced}
    made.filters |= {"breakable": breakable}
    made.globals |= {"TEXT": units.TEXT, "NONE": units.NONE, "NAMES": NAMES, "LONG": LONG}
    made.globals |= {"WRONG": parity.WRONG}
    return made


# ---- content ----


def content(report: Report, *, drawn: bool = False) -> dict[str, Any]:
    """Return everything that a page shows; ``drawn`` adds the charts of each group."""
    groups, unfinished = report.groups[:GROUPS], report.unfinished[:MANY]
    measured = [row for group in groups for row in group.rows[:MANY]]
    commands = [(row.label, row.first.command) for row in measured]
    commands += [(f"{u.label} ({u.status.value})", u.result.command) for u in unfinished]
    machines = (
        tuple((name, lookup.listed(values)) for name, values in facts.items())
        for facts in (lookup.environment(group.rows) for group in groups)
    )
    return {
        "title": f"Headroom: {report.suite.name or 'report'}",
        "started": report.suite.started.replace("T", " ").replace("+00:00", " UTC"),
        "summary": sentences.summary(report),
        "groups": [_group(group, drawn) for group in groups],
        "left_out": sentences.left_out(report),
        "recorded": [(label(r.spec), r.recordings) for r in report.recorded[:MANY]],
        "unfinished": tables.unfinished_grid(unfinished),
        "logs": [(u.label, printable(u.result.log_tail)) for u in unfinished if u.result.log_tail],
        "audits": [(u.label, _audit(u.result.audit)) for u in unfinished if u.result.audit],
        "skipped": sentences.first_of(report.skipped, "skipped files"),
        "environments": list(dict.fromkeys(filter(None, machines))),
        "commands": [(name, command) for name, command in commands if command],
    }


def _group(group: Group, drawn: bool) -> dict[str, Any]:
    shown = dataclasses.replace(group, rows=group.rows[:MANY])
    return {
        "device": group.device,
        "headline": headline(group),
        "setting": sentences.setting(group),
        "unlike": group.unlike,
        "stamp": sentences.stamp(group),
        "gpu": group.meter == "cuda",
        "errors": sentences.errors(group),
        "answers": [(a.question, a.row.label if a.row else "", a.text) for a in answers(group)],
        "predictions": sentences.prediction_errors(group),
        "fits": tables.fits(group),
        "reference": group.reference.label,
        "instead": f", in place of {group.asked}" if group.asked else "",
        "floor": lookup.noise_floor(group),
        "ranking": tables.ranking(group),
        "notes": sentences.notes(group),
        "tables": tables.group_grids(shown),
        "charts": charts.of_group(shown) if drawn else {},
        "evidence": [_evidence(row) for row in shown.rows] if drawn else [],
    }


def _evidence(row: Row) -> tuple[str, str, list[str]]:
    """Return a row's name, the share of checks that hold, and a line for each fact and check."""
    checks = row.first.audit
    held = f"{sum(check.ok for check in checks)} of {len(checks)} checks hold"
    facts = [f"{name}: {_words(worded(values))}" for name, values in row.first.evidence.items()]
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


# ---- filters ----


def breakable(text: str) -> Any:
    """Return a recipe as HTML that may break after a part or its name."""
    from markupsafe import Markup, escape

    return Markup(str(escape(text)).replace("+", "+<wbr>").replace(":", ":<wbr>"))


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
    """Return a table as Markdown; numbers are right-aligned."""
    rules = ["---" if column.kind in units.TEXT else "--:" for column in grid.columns]
    lines = [f"| {' | '.join(grid.heads)} |", f"|{'|'.join(rules)}|"]
    for cells, marks in grid.rows:
        texts = []
        for text, head in zip(cells, grid.heads, strict=True):
            text = " ".join(text.split()).replace("|", "\\|")
            wrong = "alarm" in marks and any(word in text for word in parity.WRONG)
            shown = code(text) if head == "Recipe" else plain(text)
            texts.append(f"**{shown}**" if wrong else shown)
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)

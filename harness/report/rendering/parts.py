"""Pieces of the HTML and Markdown reports: tables, legends, evidence, commands and the glossary."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from harness.report.data import environment as environment_facts
from harness.report.data.answers import MANY, in_full
from harness.report.data.grid import Grid, text_grid
from harness.report.data.rows import Group, Report, Row, Unfinished
from harness.report.figures import parity, units
from harness.report.rendering.explanations import GLOSSARY
from harness.report.rendering.svg import element
from strategies.evidence.rules import settings, worded

HEAD = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
)
STYLE = Path(__file__).with_name("page.css")
LONG = 40
"""Characters of text from which a cell is broken into lines."""
NAMES = ("Recipe", "Fastest that fits", "Adding", "Status")
"""Heads of columns of names, which break only between parts."""
FAILED = "(does not hold)"
PAGE = 50
"""Rows on a page of a table with more than ``MANY`` rows."""


def tag(name: str, text: str, classes: str = "") -> str:
    """Return an element around plain text."""
    look = f' class="{classes}"' if classes else ""
    return f"<{name}{look}>{escape(text)}</{name}>"


def section(key: str, title: str, *parts: str) -> str:
    """Return a section with a heading to link to."""
    return "\n".join([f'<h2 id="{key}">{escape(title)}</h2>', *(p for p in parts if p)])


def table(grid: Grid, *, heat: bool = False, note: bool = True) -> str:
    """Return a table; ``heat`` fills numeric cells in proportion to the table's largest value."""
    top = max((_value(c) for line in grid.lines for c in line[1:]), default=0.0) if heat else 0.0
    columns = list(zip(grid.heads, grid.kinds, strict=True))
    head = "".join(_detail(_head_cell(h, _classes(k)), h, grid) for h, k in columns)
    body = []
    for line, marks in zip(grid.lines, grid.marks, strict=True):
        cells = [
            _detail(_cell(c, h, k, top), h, grid) for c, (h, k) in zip(line, columns, strict=True)
        ]
        look = f' class="{" ".join(marks)}"' if marks else ""
        body.append(f"<tr{look}>{''.join(cells)}</tr>")
    below = tag("p", grid.note, "note") if note and grid.note else ""
    rows = "\n".join(body)
    paged = f' data-rows="{PAGE}"' if len(grid.lines) > MANY else ""
    return (
        f'{_switch(grid)}<div class="wide"><table data-key="{grid.key}"{paged}><thead><tr>{head}'
        f"</tr></thead>\n<tbody>{rows}</tbody></table></div>{below}"
    )


def _switch(grid: Grid) -> str:
    """Return the checkbox that shows the details of the table after it; it needs no JavaScript."""
    if not grid.details:
        return ""
    return f'<label class="switch"><input type="checkbox"> All {len(grid.heads)} columns</label>'


def _detail(cell: str, head: str, grid: Grid) -> str:
    """Return a cell; one of a detail column has the class that the switch shows."""
    if head not in grid.details:
        return cell
    if ' class="' in cell.partition(">")[0]:
        return cell.replace(' class="', ' class="detail ', 1)
    return re.sub(r"^<(t[hd])", r'<\1 class="detail"', cell)


def _cell(text: str, head: str, kind: str, top: float) -> str:
    """Return a cell with its column's head, which a narrow page shows beside it.

    Narrow pages stack the cells of a row and leave out empty ones.
    """
    cell = _body_cell(text, head, kind, top)
    if head in NAMES[:3] or text in ("", units.NONE):
        return cell
    return cell.replace("<td", f'<td data-head="{escape(head)}"', 1)


def breakable(recipe: str, name: str, classes: str = "") -> str:
    """Return an element around a recipe, which may break after a part or its name."""
    return tag(name, recipe, classes).replace("+", "+<wbr>").replace(":", ":<wbr>")


def _classes(kind: str) -> str:
    classes = ["t"] if kind in units.TEXT else []
    classes += ["flag"] if kind == "flag" else []
    return " ".join(classes)


def _head_cell(head: str, classes: str) -> str:
    """Return a head cell; long names may break after an underscore."""
    return tag("th", head, classes).replace("_", "_<wbr>")


def _body_cell(cell: str, head: str, kind: str, top: float) -> str:
    look = _classes(kind)
    look += " long" if kind in units.TEXT and len(cell) > LONG else ""
    if kind == "flag":
        return f'<td class="{look}">{_pills(cell)}</td>'
    if head in NAMES:
        return breakable(cell, "td", f"{look} name")
    if parity.alarming(cell):
        return tag("td", cell, f"{look} bad")
    if top and kind == "gib" and cell != units.NONE:
        share = 100 * _value(cell) / top
        return f'<td class="heat" style="--share:{share:.0f}%">{escape(cell)}</td>'
    return tag("td", cell, look)


def _pills(cell: str) -> str:
    """Return flags, each in its own frame."""
    known = {"reference": "", "front": "front", "noisy": "noisy", "DIFFERS": "alarm"}
    known["beyond design"] = "alarm"
    words = [w for w in cell.split(", ") if w and w != units.NONE]
    return ", ".join(
        f'<span class="pill {known[w]}">{w}</span>' if w in known else escape(w) for w in words
    )


def _value(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return 0.0


def colour_keys(keys: Sequence[tuple[str, str]]) -> str:
    """Return a legend of coloured squares."""
    items = [f'<li><i style="background:{colour}"></i>{escape(n)}</li>' for n, colour in keys]
    return f'<ul class="keys">{"".join(items)}</ul>'


def line_keys(keys: Sequence[tuple[str, str, str]]) -> str:
    """Return a legend of coloured, dashed lines."""
    items = []
    for name, colour, dash in keys:
        look: dict[str, Any] = {
            "stroke": colour,
            "stroke_width": 2.4,
            "stroke_dasharray": dash or None,
        }
        line = element("line", x1=0, x2=26, y1=4, y2=4, **look)
        items.append(
            f'<li><svg viewBox="0 0 26 8" aria-hidden="true">{line}</svg>{escape(name)}</li>'
        )
    return f'<ul class="keys">{"".join(items)}</ul>'


def evidence(group: Group) -> str:
    """Return each row's evidence and audit, collapsed."""
    return "\n".join([tag("h3", "Evidence and audit"), *map(_row_details, group.rows)])


def _row_details(row: Row) -> str:
    checks = row.first.audit
    held = sum(check.ok for check in checks)
    summary = f"<summary>{escape(row.label)}<small>{held} of {len(checks)} checks hold</small>"
    lines = [[name, _plain(worded(facts))] for name, facts in row.first.evidence.items()]
    left = _facts(["Strategy", "Read back"], lines)
    right = _audit(checks)
    return f'<details>{summary}</summary><div class="pair">{left}{right}</div></details>'


def _audit(checks: Sequence[Any]) -> str:
    lines = [
        [c.name, _plain(c.asked), _plain(c.found) + ("" if c.ok else f" {FAILED}")] for c in checks
    ]
    marks = [() if check.ok else ("alarm",) for check in checks]
    return _facts(["Audit", "Asked", "Found"], lines, marks)


def audit_details(unfinished: Unfinished) -> str:
    """Return the audit of a void row."""
    if not unfinished.result.audit:
        return ""
    checks = _audit(unfinished.result.audit)
    return (
        f"<details><summary>{escape(unfinished.label)}<small>audit</small></summary>"
        f'<div class="pair">{checks}</div></details>'
    )


def _facts(heads: list[str], lines: list[list[str]], marks: Sequence[tuple[str, ...]] = ()) -> str:
    grid = text_grid("facts", "", dict.fromkeys(heads, "text"), lines)
    return table(dataclasses.replace(grid, marks=list(marks) or grid.marks))


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)


def environment(report: Report) -> str:
    """Return machine and software facts of each shown group, once if they are equal."""
    shown = in_full(report.groups)
    found = dict.fromkeys(_facts_list(environment_facts.merged(g.rows)) for g, _ in shown)
    blocks = [block for block in found if block]
    return section("environment", "Environment", "<hr>".join(blocks)) if blocks else ""


def _facts_list(facts: dict[str, list[str]]) -> str:
    items = []
    for name, values in facts.items():
        title = name.removeprefix("versions.").replace("_bytes", " memory").replace("_", " ")
        title = "memory" if name == "memory_bytes" else title
        text = environment_facts.listed(values)
        items.append(f"<div><span>{escape(title)}</span>{escape(text)}</div>")
    return f'<div class="facts">{"".join(items)}</div>' if items else ""


def commands(report: Report) -> str:
    """Return each row's exact command, to run from the repository's root."""
    shown = [row for _, group in in_full(report.groups) for row in group.rows]
    every = [(row.label, row.first.command) for row in shown]
    unfinished = report.unfinished[:MANY]
    every += [(f"{u.label} ({u.status.value})", u.result.command) for u in unfinished]
    blocks = [
        f'<div class="command"><p>{escape(label)}</p><pre>{escape(command)}</pre>'
        '<button type="button" hidden>Copy</button></div>'
        for label, command in every
        if command
    ]
    note = tag("p", "Command of each row, to run it alone from the repository's root.", "note")
    return section("commands", "Commands", note, *blocks) if blocks else ""


def how_to_read(report: Report) -> str:
    """Return the meaning of each column."""
    if not report.groups:
        return ""
    items = [f"<div><dt>{escape(n)}</dt><dd>{escape(text)}</dd></div>" for n, text in GLOSSARY]
    note = tag(
        "p", "GiB = 2^30 bytes. A dash means: not defined. Other words: docs/glossary.md.", "note"
    )
    return section("read", "Reading this page", f'<dl class="read">{"".join(items)}</dl>', note)


# ---- Markdown ----


def plain(text: str) -> str:
    """Escape text from results (a reason, a name), so that it makes no HTML, link or picture."""
    return text.replace("<", "&lt;").replace("](", "]\\(")


def code(text: str) -> str:
    """Return text as inline code, with its backticks replaced."""
    return f"`{text.replace('`', chr(39))}`"


def fence(language: str, lines: Sequence[str]) -> list[str]:
    """Return a block of code that its lines cannot close."""
    longest = max((len(run) for run in re.findall("`+", "\n".join(lines))), default=0)
    ticks = "`" * max(3, longest + 1)
    return [f"{ticks}{language}", *lines, ticks]


def table_lines(grid: Grid) -> list[str]:
    """Return a table's lines; numbers are right-aligned."""
    rules = ["---" if kind in units.TEXT else "--:" for kind in grid.kinds]
    lines = [_line(grid.heads), f"|{'|'.join(rules)}|"]
    for cells, marks in zip(grid.lines, grid.marks, strict=True):
        alarm = "alarm" in marks
        lines.append(
            _line([_markdown_cell(c, h, alarm) for c, h in zip(cells, grid.heads, strict=True)])
        )
    return lines


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_cell(text: str, head: str, alarm: bool) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    if head == "Recipe":
        return code(text)
    text = plain(text)
    return f"**{text}**" if alarm and parity.alarming(text) else text


# ---- settings in evidence ----
# Facts that are settings, not observed effects.


IN_FORCE_HEAD = "Settings, not effects"
NOTE = (
    "Evidence that could only be read from a setting. All other evidence was read from "
    "the training's effects."
)


def sentences(report: Report) -> list[tuple[str, str]]:
    """Return (strategy, names of its facts that are settings) over all rows, in order."""
    found: dict[str, dict[str, None]] = {}
    for group in report.groups:
        for row in group.rows:
            for name, facts in row.first.evidence.items():
                if settings(facts):
                    found.setdefault(name, {}).update(dict.fromkeys(settings(facts)))
    return [(name, ", ".join(sorted(facts))) for name, facts in found.items()]


def markdown(report: Report) -> list[str]:
    """Return the lines of the Markdown report; none if every fact is an effect."""
    lines = [f"- {code(name)}: {plain(facts)}" for name, facts in sentences(report)]
    return [f"## {IN_FORCE_HEAD}", "", NOTE, "", *lines, ""] if lines else []

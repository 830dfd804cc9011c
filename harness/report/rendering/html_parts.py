"""Pieces of the HTML report: tables, folded evidence, commands, and the explanation of columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from harness.report import surroundings, units
from harness.report.rows import Group, Report, Row, Unfinished
from harness.report.svg import element
from harness.report.table import Grid

__all__ = [
    "audit_details",
    "breakable",
    "colour_keys",
    "commands",
    "environment",
    "evidence",
    "grid",
    "how_to_read",
    "line_keys",
    "section",
    "tag",
]

LONG = 40
"""Characters of text from which on a cell is broken into lines."""
NAMES = ("Recipe", "Fastest that fits", "Adding", "Status")
READ = (
    ("Peak", "The most a device's fullest rank held in any phase: on a GPU, live tensors by the "
     "caching allocator (max_memory_allocated); without one, the resident high-water mark above "
     "the baseline."),
    ("Active, reserved", "GPU only. Active: tensors and blocks waiting to be reused by a stream. "
     "Reserved: what the allocator took from the device; the difference to the peak is cache and "
     "fragmentation."),
    ("Process", "The device's own count for the process: reserved, plus context, communication "
     "and library workspaces. nvidia-smi shows this one. Without a GPU, the plain resident mark."),
    ("Needs", "What must fit: on a GPU the largest of peak, reserved and process; else the peak."),
    ("Predicted need", "The least that the row was predicted to run in, with the CUDA context, "
     "libraries and communication; of the host, the tensors of all processes."),
    ("Baseline", "What the process held before the model was built, subtracted without a GPU."),
    ("Host", "Resident high-water mark of one rank, and of all processes of the run together; "
     "offloaded optimizer state is here."),
    ("Ranks max/min", "Highest over lowest peak of the ranks: 1.00 is balanced."),
    ("Workspace, untraced", "Workspace: traced bytes of no other category: temporaries of "
     "backward and the optimizer, communication buckets, kernel scratch. Untraced: what the "
     "measured peak has beyond the traced tensors."),
    ("Samples/s", "Global batch over the median step, of the whole job, not of one device."),
    ("x ref, vs ref %", "Samples/s as a multiple of the reference row's; change of the peak."),
    ("MFU", "The model's FLOPs a second on each device, over its dense peak at the type the row "
     "computes in. Recomputation does not count as work."),
    ("Loss vs ref", "Equal: no step's loss or gradient norm is more than 1e-3 from the "
     "reference's, relative. By design: the recipe changes the computation, and how far."),
    ("Void", "The audit found other work than was asked for, so the row is not ranked."),
)  # fmt: skip


def tag(name: str, words: str, kind: str = "") -> str:
    """An element around plain text."""
    look = f' class="{kind}"' if kind else ""
    return f"<{name}{look}>{escape(words)}</{name}>"


def section(key: str, title: str, *parts: str) -> str:
    """A section with a heading to link to."""
    return "\n".join([f'<h2 id="{key}">{escape(title)}</h2>', *(p for p in parts if p)])


def grid(table: Grid, *, heat: bool = False, note: bool = True) -> str:
    """A table; ``heat`` fills numeric cells in proportion to the table's largest value."""
    top = max((_value(c) for line in table.lines for c in line[1:]), default=0.0) if heat else 0.0
    pairs = list(zip(table.heads, table.kinds, strict=True))
    head = "".join(_head_cell(h, _kind(k)) for h, k in pairs)
    body = []
    for line, marks in zip(table.lines, table.marks, strict=True):
        cells = [_body_cell(c, h, k, top) for c, (h, k) in zip(line, pairs, strict=True)]
        look = f' class="{" ".join(marks)}"' if marks else ""
        body.append(f"<tr{look}>{''.join(cells)}</tr>")
    below = tag("p", table.note, "note") if note and table.note else ""
    rows = "\n".join(body)
    return (
        f'<div class="wide"><table data-key="{table.key}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>{below}"
    )


def breakable(words: str, name: str, kind: str = "") -> str:
    """An element around a recipe, which may be broken after a part or its name."""
    return tag(name, words, kind).replace("+", "+<wbr>").replace(":", ":<wbr>")


def _kind(kind: str) -> str:
    words = ["t"] if kind in units.TEXT else []
    words += ["flag"] if kind == "flag" else []
    return " ".join(words)


def _head_cell(words: str, kind: str) -> str:
    """A head; long names with underscores may break after one."""
    return tag("th", words, kind).replace("_", "_<wbr>")


def _body_cell(cell: str, head: str, kind: str, top: float) -> str:
    look = _kind(kind)
    look += " long" if kind in units.TEXT and len(cell) > LONG else ""
    if kind == "flag":
        return f'<td class="{look}">{_pills(cell)}</td>'
    if head in NAMES:
        return breakable(cell, "td", f"{look} name")
    if "DIFFERS" in cell:
        return tag("td", cell, f"{look} bad")
    if top and kind == "gib" and cell != units.NONE:
        share = 100 * _value(cell) / top
        return f'<td class="heat" style="--share:{share:.0f}%">{escape(cell)}</td>'
    return tag("td", cell, look)


def _pills(cell: str) -> str:
    known = {"reference": "", "front": "front", "noisy": "noisy", "DIFFERS": "alarm"}
    words = [w for w in cell.split(", ") if w and w != units.NONE]
    return "".join(
        f'<span class="pill {known[w]}">{w}</span>' if w in known else escape(w) for w in words
    )


def _value(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return 0.0


def colour_keys(keys: Sequence[tuple[str, str]]) -> str:
    """A legend of coloured squares."""
    items = [f'<li><i style="background:{colour}"></i>{escape(n)}</li>' for n, colour in keys]
    return f'<ul class="keys">{"".join(items)}</ul>'


def line_keys(keys: Sequence[tuple[str, str, str]]) -> str:
    """A legend of coloured, dashed lines."""
    items = []
    for name, colour, dash in keys:
        look = {"stroke": colour, "stroke_width": 2.4, "stroke_dasharray": dash or None}
        line = element("line", x1=0, x2=26, y1=4, y2=4, **look)
        items.append(
            f'<li><svg viewBox="0 0 26 8" aria-hidden="true">{line}</svg>{escape(name)}</li>'
        )
    return f'<ul class="keys">{"".join(items)}</ul>'


def evidence(group: Group) -> str:
    """What each row showed to be in force, and its audit: folded."""
    parts = [tag("h3", "Evidence and audit")]
    return "\n".join(parts + [_row_details(row) for row in group.rows])


def _row_details(row: Row) -> str:
    checks = row.first.audit
    held = sum(check.ok for check in checks)
    summary = f"<summary>{escape(row.label)}<small>{held} of {len(checks)} checks hold</small>"
    shown = [[name, _plain(facts)] for name, facts in row.first.evidence.items()]
    left = _facts(["Strategy", "Read back"], shown)
    right = _facts(["Audit", "Asked", "Found"], _checks(checks))
    return f'<details>{summary}</summary><div class="pair">{left}{right}</div></details>'


def _checks(checks: Sequence[Any]) -> list[list[str]]:
    return [
        [c.name, _plain(c.asked), _plain(c.found) + ("" if c.ok else " (does not hold)")]
        for c in checks
    ]


def audit_details(gone: Unfinished) -> str:
    """The audit of a row that is void."""
    if not gone.result.audit:
        return ""
    shown = _facts(["Audit", "Asked", "Found"], _checks(gone.result.audit))
    return (
        f"<details><summary>{escape(gone.label)}<small>audit</small></summary>"
        f'<div class="pair">{shown}</div></details>'
    )


def _facts(heads: list[str], lines: list[list[str]]) -> str:
    kinds = ["text"] * len(heads)
    marks = [("alarm",) if line[-1].endswith("(does not hold)") else () for line in lines]
    return grid(Grid(key="facts", title="", heads=heads, kinds=kinds, lines=lines, marks=marks))


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)


def environment(report: Report) -> str:
    """Facts of the machine and software of each group's rows, once where they are the same."""
    blocks = dict.fromkeys(_facts_list(surroundings.merged(g.rows)) for g in report.groups)
    shown = [block for block in blocks if block]
    return section("environment", "Environment", "<hr>".join(shown)) if shown else ""


def _facts_list(facts: dict[str, list[str]]) -> str:
    items = []
    for name, values in facts.items():
        words = name.removeprefix("versions.").replace("_bytes", " memory").replace("_", " ")
        words = "memory" if name == "memory_bytes" else words
        shown = escape(" / ".join(values))
        items.append(f"<div><span>{escape(words)}</span>{shown}</div>")
    return f'<div class="facts">{"".join(items)}</div>' if items else ""


def commands(report: Report) -> str:
    """Each row's exact command, to be pasted at the repository's root."""
    every = [(row.label, row.first.command) for group in report.groups for row in group.rows]
    every += [(f"{u.label} ({u.status.value})", u.result.command) for u in report.unfinished]
    blocks = [
        f'<div class="command"><p>{escape(label)}</p><pre>{escape(command)}</pre>'
        '<button type="button" hidden>Copy</button></div>'
        for label, command in every
        if command
    ]
    note = tag("p", "Each row again, alone: run from the repository's root.", "note")
    return section("commands", "Commands", note, *blocks) if blocks else ""


def how_to_read(report: Report) -> str:
    """What each column is."""
    if not report.groups:
        return ""
    items = [f"<div><dt>{escape(n)}</dt><dd>{escape(text)}</dd></div>" for n, text in READ]
    note = tag("p", "GiB = 2^30 bytes. A dash is a value that is not defined here.", "note")
    return section("read", "How to read this", f'<dl class="read">{"".join(items)}</dl>', note)

"""Pages against raw results: every table that is found must be known, and every cell must hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.recount import answers, stories
from tests.recount import versus as v
from tests.recount.cells import Number, fault
from tests.recount.columns import TABLES, UNFINISHED
from tests.recount.lines import LINES
from tests.recount.pages import Table, Text, items
from tests.recount.raw import Group, ResultSet, Row

__all__ = ["group_of", "page_faults", "report_faults", "table_faults"]


def report_faults(page: Path, results: ResultSet) -> Iterator[str]:
    """Mismatches of a set's own report: all of its groups must be there."""
    shown: list[Group] = []
    yield from page_faults(page, results, shown)
    if len(shown) != len(results.groups):
        yield f"{len(shown)} groups are shown, {len(results.groups)} were measured"


def page_faults(
    page: Path, results: ResultSet, shown: list[Group], wanted: Sequence[Table] | None = None
) -> Iterator[str]:
    """Mismatches of the tables of a page (the ``wanted`` ones alone, if given) with a set of
    results; the groups whose ranking was found are added to ``shown``."""
    every, group = list(items(page)), None
    for place, item in enumerate(every):
        if isinstance(item, Text):
            of = group_of(every[place:], results, item.text)
            group = of or group
            yield from _text_faults(item.text, group, results) if wanted is None else ()
        elif wanted is None or item in wanted:
            group = group or group_of(every[place:], results)
            shown += [group] if _title(item) == "Ranking" else []
            for one in table_faults(item, results, group):
                yield f"{_title(item)}: {one}"


# ---- sentences ----


def _text_faults(text: str, group: Group | None, results: ResultSet) -> Iterator[str]:
    question = text.partition(": ")[0]
    if group and question in answers.best:
        yield from answers.answer_faults(text, group)
    elif group and text.startswith("Predicted without running: "):
        yield from answers.prediction_faults(text, group)
    elif group and text.startswith("Reference row: "):
        said = text.removeprefix("Reference row: ").rstrip(".")
        yield from [f"{text} It is {group.reference.label}"] * (said != group.reference.label)
    elif re.match(r"\d+ measured", text):
        yield from _summary_faults(text, results)


def _summary_faults(text: str, results: ResultSet) -> Iterator[str]:
    """How many rows ended how."""
    counts = {"measured": len(results.rows)}
    for run in results.unfinished:
        counts[run.status] = counts.get(run.status, 0) + 1
    said = {word: int(n) for n, word in re.findall(r"\b(\d+) ([a-z_]+)(?= \(|[,.])", text)}
    if said != counts:
        yield f"{text!r}: recounted {counts}"


# ---- which group ----


def _setting(group: Group) -> tuple[Any, ...]:
    first, spec = group.reference.first, group.reference.spec
    return (
        f"{spec['model']} (",
        Number(first["parameters"] / 1e6, 1),
        f" M parameters) on {spec['data']}, {spec['objective']} objective, global batch "
        f"{spec['global_batch']}, seed {spec['seed']}, {spec['warmup']} warm-up + {spec['steps']} "
        "timed steps",
    )


def group_of(rest: list[Table | Text], results: ResultSet, setting: str = "") -> Group | None:
    """The group that a sentence names; of several that it may name, or without one, that with the
    rows of the next ranking."""
    named = [g for g in results.groups if not (setting and fault(setting, _setting(g)))]
    rankings = (t for t in rest if isinstance(t, Table) and _title(t) == "Ranking")
    ranking = next(rankings, None)
    column = ranking.heads.index("Recipe") if ranking else 0
    labels = {line[column] for line in ranking.lines} if ranking else set()
    alike = [g for g in named if {row.label for row in g.rows} == labels]
    return next(iter(alike or named), None)


# ---- tables ----


def _title(table: Table) -> str:
    """What a table is, by its heads where it has no title of its own."""
    if table.heads[:2] == ["#", "Recipe"]:
        return "Ranking"
    return "Fits" if table.heads[0].endswith(("Fits in GiB", "GiB a device")) else table.title


def table_faults(table: Table, results: ResultSet, group: Group | None) -> Iterator[str]:
    """Mismatches of one table."""
    title = _title(table)
    if stories.told(title):
        yield from stories.told(title)(table, results)
    elif title == "Did not finish" and table.heads[0] == "Recipe":
        yield from _lines(table, UNFINISHED, results.unfinished)
    elif table.heads[0] in FACTS:
        yield from _facts(table, results, group)
    elif group is None:
        yield "no group of the raw results has its rows"
    elif title == "Fits":
        yield from answers.fits_faults(table.lines, group)
    elif title in TABLES:
        yield from _lines(table, TABLES[title], LINES.get(title, v.ranked)(group))
    else:
        yield f"no rule here for a table of {table.heads}"


def _lines(
    table: Table, columns: dict[str, Callable[[Any], Any]], subjects: Sequence[Any]
) -> Iterator[str]:
    """Line by line, column by column."""
    unknown = [head for head in table.heads if head not in columns]
    yield from (f"no rule here for the column {head!r}" for head in unknown)
    if len(table.lines) != len(subjects):
        yield f"{len(table.lines)} lines, {len(subjects)} recounted"
    for line, subject in zip(table.lines, subjects, strict=False):
        for head, text in zip(table.heads, line, strict=True):
            wrong = fault(text, columns[head](subject)) if head in columns else ""
            if wrong:
                yield f"{line[0] if head == '#' else ' '.join(line[:2])}, {head}: {wrong}"


# ---- evidence and audit, as they were read back ----

FACTS = ("Strategy", "Audit")


def _facts(table: Table, results: ResultSet, group: Group | None) -> Iterator[str]:
    """A row's evidence or audit, word for word."""
    found = re.fullmatch(r"(.*?) (?:(\d+) of (\d+) checks hold|audit)", table.title)
    rows: list[Row] = group.rows if group else []
    data = next((row.first for row in rows if found and row.label == found[1]), None)
    if found and found[2] is None:
        ended = (run.data for run in results.unfinished if run.spec["recipe"] == found[1])
        data = next(ended, None)
    if data is None:
        yield f"no row for {table.title!r}"
        return
    audit = data["audit"]
    held = sum(check["ok"] for check in audit)
    if found[2] and (int(found[2]), int(found[3])) != (held, len(audit)):
        yield f"{table.title}: {held} of {len(audit)} hold"
    lines = [[name, _plain(facts)] for name, facts in data["evidence"].items()]
    if table.heads[0] == "Audit":
        lines = [[c["name"], _plain(c["asked"]), _plain(c["found"])] for c in audit]
    for printed, line in zip(table.lines, lines, strict=False):
        if [" ".join(t.split()) for t in line] != [t.removesuffix(" FAILED") for t in printed]:
            yield f"{table.title}: {printed} is printed, {line} recorded"
    if len(lines) != len(table.lines):
        yield f"{table.title}: {len(table.lines)} lines, {len(lines)} recorded"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
    return value if isinstance(value, str) else json.dumps(value)

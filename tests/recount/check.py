"""Pages against raw results: every table that is found must be known, and every cell must hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.recount import answers, drawn, sentences, stories
from tests.recount import versus as v
from tests.recount.cells import Number, fault
from tests.recount.columns import TABLES, UNFINISHED
from tests.recount.lines import LINES
from tests.recount.pages import Table, Text, items
from tests.recount.raw import Group, ResultSet, Row
from tests.recount.words import named

__all__ = ["group_of", "page_faults", "report_faults", "table_faults"]


def report_faults(page: Path, results: ResultSet) -> Iterator[str]:
    """Mismatches of a set's own report: all of its groups must be there, with all that is to be
    said of each."""
    shown: list[Group] = []
    yield from page_faults(page, results, shown)
    if len(shown) != len(results.groups):
        yield f"{len(shown)} groups are shown, {len(results.groups)} were measured"
    for group, texts, tables in sections(page, results):
        missing = wanted_tables(group, page.suffix == ".md") ^ (set(tables) & set(TABLES))
        yield from (f"{group.reference.label}'s table {title!r} is amiss" for title in missing)
        yield from sentences.group_faults(texts, group)
        questions = [text.partition(": ")[0] for text in texts]
        yield from answers.missing_answers([q for q in questions if q in answers.best], group)
        told = any(text.startswith(PREDICTED) for text in texts)
        if told is not answers.needs_predictions(group):
            yield f"the errors of predictions are {'' if told else 'not '}told"
    titles = [item.title for item in items(page) if isinstance(item, Table)]
    for due in stories.due(results):
        if not any(title.startswith(due) for title in titles):
            yield f"the table {due!r} is missing"
    texts = [item.text for item in items(page) if isinstance(item, Text)]
    yield from _whole_faults(texts, results, page.suffix == ".md")


def sections(page: Path, results: ResultSet) -> Iterator[tuple[Group, list[str], list[str]]]:
    """Each group of a report with the texts and the titles of the tables below its head."""
    every, found = list(items(page)), []
    for place, item in enumerate(every):
        new = group_of(every[place:], results, item.text) if isinstance(item, Text) else None
        if new:
            found.append((new, [], []))
        elif found:
            texts, tables = found[-1][1:]
            texts += [item.text] if isinstance(item, Text) else []
            tables += [] if isinstance(item, Text) else [_title(item)]
    yield from found


def wanted_tables(group: Group, pictured: bool) -> set[str]:
    """Titles of the tables that a group has lines for."""
    own, other = "Live tensors of each phase", "Resident mark of each phase"
    never = {other if group.gpu else own, "Simulated" if not group.world else "Ranking"}
    never |= {"What each part does", "Same computation?"} if group.world else set()
    never |= {PICTURED} if not pictured else set()
    lines = {title: LINES.get(title, v.ranked)(group) for title in TABLES if title not in never}
    return {title for title, subjects in lines.items() if subjects}


def _whole_faults(texts: list[str], results: ResultSet, facts: bool) -> Iterator[str]:
    """What a report says of all groups together."""
    wanted = sentences.summary(results)
    if not any(text.startswith(wanted) for text in texts):
        yield f"{wanted!r} is missing"
    known = sentences.fits_words(results)
    said = [text for text in texts if "Predicted not to fit: " in text]
    if any(known not in text for text in said) or len(said) != bool(known):
        yield f"{said} is said, {known!r} recounted"
    listed = texts[texts.index(SET) + 2 :] if SET in texts else []
    ends = [place for place, text in enumerate(listed) if text in BEHIND]
    listed, wanted_facts = listed[: ends[0]] if ends else listed, sentences.set_facts(results)
    if facts and listed != wanted_facts:
        yield f"settings are {wanted_facts}, not {listed}"


RANKINGS = ("Ranking", "Simulated")
PICTURED = "What the peak is made of"
"""A table that is a picture in HTML."""
SET, BEHIND = "Settings, not effects", ("Did not finish", "Files skipped", "Environment")
PREDICTED = "Predicted without running: "


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
            shown += [group] if _title(item) in RANKINGS else []
            for one in table_faults(item, results, group):
                yield f"{_title(item)}: {one}"


# ---- sentences ----


def _text_faults(text: str, group: Group | None, results: ResultSet) -> Iterator[str]:
    question = text.partition(": ")[0]
    if group and question in answers.best:
        yield from answers.answer_faults(text, group)
    elif group and text.startswith(PREDICTED):
        yield from answers.prediction_faults(text, group)
    elif group and text.startswith("Reference row: "):
        said = text.removeprefix("Reference row: ").rstrip(".")
        instead = f", in place of {group.wanted}" if group.stands_in is not None else ""
        wanted = group.reference.label + instead
        yield from [f"{text} It is {wanted}"] * (said != wanted)
    elif group is None and text.startswith(sentences.FLOOR):  # a story's page
        wrong = fault(text, sentences.floor_words(results.ordered[0]))
        yield from [f"the noise floor: {wrong}"] if wrong else []
    elif re.match(r"([a-z_]+: )?\d+ measured", text):
        wanted = sentences.summary(results)
        if not re.sub(r"^[a-z_]+: ", "", text).startswith(wanted):
            yield f"{text!r}: recounted {wanted!r}"


# ---- which group ----


def _setting(group: Group) -> tuple[Any, ...]:
    first, spec = group.reference.first, group.reference.spec
    if drawn.draws(group):
        head, tail = drawn.setting(group)
        return (head, Number(first["parameters"] / 1e6, 1), tail)
    return (
        f"{drawn.model(spec)} (",
        Number(first["parameters"] / 1e6, 1),
        f" M parameters) on {spec['data']}, {spec['objective']} objective, global batch "
        f"{spec['global_batch']}, seed {spec['seed']}, {spec['warmup']} warm-up + {spec['steps']} "
        "timed steps",
    )


def group_of(rest: list[Table | Text], results: ResultSet, setting: str = "") -> Group | None:
    """The group that a sentence names; of several that it may name, or without one, that with the
    rows of the next ranking."""
    named = [g for g in results.groups if not (setting and fault(setting, _setting(g)))]
    rankings = (t for t in rest if isinstance(t, Table) and _title(t) in RANKINGS)
    ranking = next(rankings, None)
    column = ranking.heads.index("Recipe") if ranking else 0
    labels = {line[column] for line in ranking.lines} if ranking else set()
    alike = [g for g in named if {row.label for row in g.rows} == labels]
    return next(iter(alike or named), None)


# ---- tables ----


def _title(table: Table) -> str:
    """What a table is, by its heads where it has no title of its own."""
    if table.heads[:2] == ["#", "Recipe"]:
        return "Simulated" if "Step ms, no communication" in table.heads else "Ranking"
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
        yield from answers.fits_faults(table, group)
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
    filled = [h for h, take in columns.items() if any(take(s) not in (None, "") for s in subjects)]
    if not unknown and table.heads != filled:  # a column without a value is left out
        yield f"the columns are {table.heads}, {filled} recounted"
    if len(table.lines) != len(subjects):
        yield f"{len(table.lines)} lines, {len(subjects)} recounted"
    for line, subject in zip(table.lines, subjects, strict=False):
        for head, text in zip(table.heads, line, strict=True):
            cell = columns[head](subject) if head in columns else None
            if head == "Notes":  # HTML sets its flags apart without commas
                text, cell = text.replace(", ", " "), (cell or "").replace(", ", " ") or None
            wrong = fault(text, cell) if head in columns else ""
            if wrong:
                yield f"{line[0] if head == '#' else ' '.join(line[:2])}, {head}: {wrong}"


# ---- evidence and audit, as they were read back ----

FACTS = ("Strategy", "Audit")


def _facts(table: Table, results: ResultSet, group: Group | None) -> Iterator[str]:
    """A row's evidence or audit, word for word."""
    found = re.fullmatch(r"(.*?) (?:(\d+) of (\d+) checks hold|audit)", table.title)
    rows: list[Row] = group.rows if group else []
    data = [row.first for row in rows if found and row.label == found[1]][:1]
    if found and found[2] is None:
        data = [run.data for run in results.unfinished if named(run) == found[1]]
    faults = [list(_facts_of(table, found, one)) for one in data]
    if not faults:
        yield f"no row for {table.title!r}"
    elif all(faults):  # several that did not finish may have one label
        yield from faults[0]


def _facts_of(table: Table, found: re.Match[str], data: dict[str, Any]) -> Iterator[str]:
    audit = data["audit"]
    held = sum(check["ok"] for check in audit)
    if found[2] and (int(found[2]), int(found[3])) != (held, len(audit)):
        yield f"{table.title}: {held} of {len(audit)} hold"
    lines = [[name, _plain(_worded(facts))] for name, facts in data["evidence"].items()]
    if table.heads[0] == "Audit":
        lines = [[c["name"], _plain(c["asked"]), _found(c)] for c in audit]
    for printed, line in zip(table.lines, lines, strict=False):
        if [" ".join(t.split()) for t in line] != printed:
            yield f"{table.title}: {printed} is printed, {line} recorded"
    if len(lines) != len(table.lines):
        yield f"{table.title}: {len(table.lines)} lines, {len(lines)} recorded"


def _worded(facts: dict[str, Any]) -> dict[str, Any]:
    """A fact that is a setting says so behind its name."""
    mine = facts.get(sentences.SETTINGS, ())
    named = {f"{k} (setting, not effect)" if k in mine else k: value for k, value in facts.items()}
    return {k: value for k, value in named.items() if k != sentences.SETTINGS}


def _found(check: dict[str, Any]) -> str:
    return _plain(check["found"]) + ("" if check["ok"] else " (does not hold)")


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
    return value if isinstance(value, str) else json.dumps(value)

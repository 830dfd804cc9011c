"""The report as Markdown, for GitHub."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.report.data import lookup
from harness.report.data.answers import MANY, Answer, answers, headline, in_full
from harness.report.data.grid import Grid
from harness.report.data.rows import Group, Report, label
from harness.report.figures import parity, units
from harness.report.rendering import sentences, tables
from harness.report.rendering.explanations import MEMORY_ONLY_NOTE, RECORDED_NOTE
from strategies.evidence.rules import settings

SHOWN = (
    *("effects", "phases", "split", "memory", "host", "types", "predicted", "parts", "calibrated"),
    *("time", "parity", "drawn", "siblings", "buckets", "gathers"),
)
"""Keys of the tables below the ranking, in order."""
SETTINGS_NOTE = (
    "Evidence that could only be read from a setting. All other evidence was read from "
    "the training's effects."
)


def render(report: Report) -> str:
    """Return the whole report."""
    title = f"# Headroom: {plain(report.suite.name or 'report')}"
    lines = [title, "", plain(sentences.summary(report)), ""]
    fits = sentences.predicted_fits(report)
    lines += [plain(fits), ""] if fits else []
    groups = in_full(report.groups)
    for group, shown in groups:
        lines += _group(group, shown)
    if text := sentences.others(report, len(groups)):
        lines += [plain(text), "", *_table(tables.others(report.groups, len(groups)))]
    if report.memory_only:
        grid = tables.memory_only(report)
        lines += [f"## {grid.title}", "", MEMORY_ONLY_NOTE, "", *table_lines(grid), ""]
    lines += [*_recorded(report), *_settings(report)]
    if report.unfinished:
        listed = report.unfinished[:MANY]
        lines += _table(tables.unfinished_grid(listed))
        left = sentences.left_out(len(listed), len(report.unfinished))
        lines += [left, ""] if left else []
    if report.skipped:
        skipped = sentences.first_of(report.skipped, "skipped files")
        lines += ["## Files skipped", "", *(f"- {code(line)}" for line in skipped), ""]
    lines += [*_environment(report), *_commands(report)]
    return "\n".join(lines).rstrip() + "\n"


def _group(group: Group, shown: Group) -> list[str]:
    lines = [f"## {plain(sentences.setting(group))}", ""]
    lines += [f"**{plain(headline(group))}**", ""] if headline(group) else []
    if group.unlike:
        lines += [f"Not ranked with the rows above: {plain(group.unlike)}.", ""]
    lines += [f"> **{plain(sentences.stamp(group))}**", ""]
    for error in sentences.errors(group):
        lines += [f"> {plain(error)}", ""]
    lines += [_answer(answer) for answer in answers(group)]
    told = (sentences.prediction_errors(group), sentences.calibration(group))
    lines += [f"- {plain(text)}" for text in told if text]
    instead = f", in place of `{group.asked}`" if group.asked else ""
    lines += ["", *_fits(group), f"Reference row: `{group.reference.label}`{instead}.", ""]
    floor = lookup.noise_floor(group)
    lines += [floor, ""] if floor else []
    ranking = tables.ranking(group)
    grids = tables.group_grids(shown)
    lines += [*table_lines(ranking.short()), "", ranking.note, ""]
    notes = [f"- {plain(text)}" for text in sentences.notes(group)]
    lines += [*notes, ""] if notes else []
    lines += [sentences.detailed(group, shown), ""] if shown is not group else []
    if ranking.details:
        lines += _folded(f"Ranking, all {len(ranking.heads)} columns", table_lines(ranking))
    for key in SHOWN:
        if grids[key].lines:
            lines += _table(grids[key], "###")
    return lines


def _answer(answer: Answer) -> str:
    name = f"{code(answer.row.label)}: " if answer.row else ""
    return f"- **{answer.question}**: {name}{plain(answer.text)}"


def _fits(group: Group) -> list[str]:
    lines = ["| Fits in GiB | Fastest recipe | Samples/s | Needs GiB |", "|--:|---|--:|--:|"]
    for fit, rate, need in tables.fits(group):
        name = code(fit.row.label) if fit.row else "nothing measured fits"
        lines.append(f"| {fit.sizes} | {name}{plain(fit.others)} | {rate} | {need} |")
    return [*lines, ""] if lines[2:] else []


def _recorded(report: Report) -> list[str]:
    """Return the runs with a profile or snapshot, and their files."""
    if not report.recorded:
        return []
    lines = ["## Recorded runs, not ranked", "", RECORDED_NOTE, ""]
    for result in report.recorded[:MANY]:
        files = [f"- {code(name)}" for name in result.recordings]
        lines += [f"### {code(label(result.spec))}", "", *files, ""]
        if result.key_averages:
            lines += [*table_lines(tables.averages(result)), ""]
    return lines + sentences.more_recorded(report)


def _settings(report: Report) -> list[str]:
    """Return the facts that are settings and no observed effects, by strategy over all rows."""
    found: dict[str, set[str]] = {}
    for group in report.groups:
        for row in group.rows:
            for name, facts in row.first.evidence.items():
                if settings(facts):
                    found.setdefault(name, set()).update(settings(facts))
    lines = [f"- {code(name)}: {plain(', '.join(sorted(of)))}" for name, of in found.items()]
    return ["## Settings, not effects", "", SETTINGS_NOTE, "", *lines, ""] if lines else []


def _environment(report: Report) -> list[str]:
    lines = []
    for group, _ in in_full(report.groups):
        facts = lookup.environment(group.rows)
        texts = [f"{name} {lookup.listed(values)}" for name, values in facts.items()]
        lines += [f"- {plain(', '.join(texts))}"] if texts else []
    return ["## Environment", "", *dict.fromkeys(lines), ""] if lines else []


def _commands(report: Report) -> list[str]:
    shown = [row for _, group in in_full(report.groups) for row in group.rows]
    every = [(row.label, row.first.command) for row in shown]
    every += [(ended.label, ended.result.command) for ended in report.unfinished[:MANY]]
    commands = [f"# {name}\n{command}" for name, command in every if command]
    return ["## Commands", "", *fence("sh", commands), ""] if commands else []


# ---- parts of a page ----


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
        pairs = zip(cells, grid.heads, strict=True)
        lines.append(_line([_cell(cell, head, "alarm" in marks) for cell, head in pairs]))
    return lines


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str, head: str, alarm: bool) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    if head == "Recipe":
        return code(text)
    text = plain(text)
    return f"**{text}**" if alarm and parity.alarming(text) else text


def _table(grid: Grid, level: str = "##") -> list[str]:
    """Return a table below its title; a folded one is collapsed."""
    note = [grid.note, ""] if grid.note else []
    if grid.folded:
        return _folded(grid.title, [*table_lines(grid), "", *note])
    return [f"{level} {grid.title}", "", *table_lines(grid), "", *note]


def _folded(title: str, lines: list[str]) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>", ""]

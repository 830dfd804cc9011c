"""The report as Markdown, for GitHub."""

from __future__ import annotations

from harness.report.data import environment, lookup
from harness.report.data.answers import MANY, Answer, answers, fastest_that_fits, headline, in_full
from harness.report.data.grid import Grid
from harness.report.data.lookup import step_meter
from harness.report.data.rows import Group, Report, Row
from harness.report.figures import units
from harness.report.rendering import analyses, extra_tables, parts, sentences, tables
from harness.report.rendering.parts import code, fence, plain, table_lines

# ---- meters of an analysis ----


METERS = {
    "allocator": "live tensors, by the caching allocator",
    "trace": "live tensors, by a trace of that step",
}
"""Word of ``lookup.step_meter`` -> its description."""


def story_stamp(report: Report) -> str:
    """Return the meter of an analysis's numbers, and what they are not comparable with.

    The report has at least one group. Rows are counted by meter; rows without one are named.
    """
    group = report.groups[0]
    analysis = analyses.analysis_of(report)
    if not (analysis and analysis.of_a_step):
        return sentences.stamp(group)
    rows = [row for group in report.groups for row in group.rows]
    said = {word: [row for row in rows if step_meter(row) == word] for word in (*METERS, None)}
    meters = [_meter(word, found, rows) for word, found in said.items() if word and found]
    parts = [f"Peaks on this page are of one training step: {'; '.join(meters)}."] if meters else []
    if said[None]:
        parts.append(f"Without one: {', '.join(row.label for row in said[None])}.")
    if group.meter == "cuda":
        return " ".join([f"Measured on {group.device}.", *parts])
    where = f"Measured without a GPU, on CPU processes ({group.device})."
    return " ".join([where, *parts, "These numbers are NOT comparable with a GPU's."])


def _meter(word: str, found: list[Row], rows: list[Row]) -> str:
    return METERS[word] + ("" if len(found) == len(rows) else f" ({len(found)} rows)")


SHOWN = (
    *("effects", "phases", "split", "memory", "host", "types", "predicted", "parts", "calibrated"),
    *("time", "parity", "drawn", "siblings", "buckets", "gathers"),
)
"""Keys of the tables below the ranking, in order."""


def render(report: Report) -> str:
    """Return the whole report."""
    title = f"# Headroom: {plain(report.suite.name or 'report')}"
    lines = [title, "", plain(sentences.summary(report)), ""]
    fits = sentences.predicted_fits(report)
    lines += [plain(fits), ""] if fits else []
    for grid in analyses.tables(report):
        lines += _table(grid)
    groups = in_full(report.groups)
    for group, shown in groups:
        lines += _group(group, shown)
    if text := sentences.others(report, len(groups)):
        lines += [plain(text), "", *_table(tables.others(report.groups, len(groups)))]
    lines += extra_tables.markdown_of_memory_only(report) + extra_tables.markdown(report)
    lines += parts.markdown(report)
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


def render_story(report: Report) -> str:
    """Return the suite's analysis as its own page."""
    lines = [f"# {plain(f'{report.suite.story}: {sentences.summary(report)}')}", ""]
    for grid in analyses.tables(report):
        lines += _table(grid)
    if report.groups:
        lines += [f"> {story_stamp(report)}", "", f"{sentences.setting(report.groups[0])}.", ""]
        lines += [lookup.noise_floor(report.groups[0]), ""]
    return "\n".join([*lines, *_environment(report)]).rstrip() + "\n"


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
    lines += ["", *_fits(group), _reference(group), ""]
    lines += [text for text in (lookup.noise_floor(group), "") if lookup.noise_floor(group)]
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


def _reference(group: Group) -> str:
    instead = f", in place of `{group.asked}`" if group.asked else ""
    return f"Reference row: `{group.reference.label}`{instead}."


def _answer(answer: Answer) -> str:
    name = f"{code(answer.row.label)}: " if answer.row else ""
    return f"- **{answer.question}**: {name}{plain(answer.text)}"


def _fits(group: Group) -> list[str]:
    fits = fastest_that_fits(group)
    if not fits:
        return []
    lines = ["| Fits in GiB | Fastest recipe | Samples/s | Needs GiB |", "|--:|---|--:|--:|"]
    rates = units.column("rate", [f.row and f.row.numbers.samples_per_second for f in fits])
    needs = units.column("gib", [f.row and f.row.numbers.need_bytes for f in fits])
    for fit, rate, need in zip(fits, rates, needs, strict=True):
        name = code(fit.row.label) if fit.row else "nothing measured fits"
        lines.append(f"| {fit.sizes} | {name}{plain(fit.others)} | {rate} | {need} |")
    return [*lines, ""]


def _table(grid: Grid, level: str = "##") -> list[str]:
    """Return a table below its title; a folded one is collapsed."""
    note = [grid.note, ""] if grid.note else []
    if grid.folded:
        return _folded(grid.title, [*table_lines(grid), "", *note])
    return [f"{level} {grid.title}", "", *table_lines(grid), "", *note]


def _folded(title: str, lines: list[str]) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>", ""]


def _environment(report: Report) -> list[str]:
    lines = []
    for group, _ in in_full(report.groups):
        facts = environment.merged(group.rows)
        texts = [f"{name} {environment.listed(values)}" for name, values in facts.items()]
        lines += [f"- {plain(', '.join(texts))}"] if texts else []
    return ["## Environment", "", *dict.fromkeys(lines), ""] if lines else []


def _commands(report: Report) -> list[str]:
    shown = [row for _, group in in_full(report.groups) for row in group.rows]
    every = [(row.label, row.first.command) for row in shown]
    every += [(ended.label, ended.result.command) for ended in report.unfinished[:MANY]]
    commands = [f"# {label}\n{command}" for label, command in every if command]
    return ["## Commands", "", *fence("sh", commands), ""] if commands else []

"""The report as Markdown, for GitHub."""

from __future__ import annotations

from harness.report import (
    fit_verdicts,
    predicted,
    recorded,
    stories,
    surroundings,
    table,
    units,
    words,
)
from harness.report.rows import Group, Report

__all__ = ["grid_lines", "render", "render_story"]

SHOWN = (
    *("effects", "phases", "split", "memory", "host", "types", "predicted", "parts", "time"),
    *("parity", "buckets"),
)


def render(report: Report) -> str:
    """The whole report."""
    title = f"# Headroom: {report.suite.name or 'report'}"
    lines = [title, "", words.summary(report), ""]
    verdict = fit_verdicts.summary(report)
    lines += [verdict, ""] if verdict else []
    for grid in stories.told(report):
        lines += _grid(grid)
    for group in report.groups:
        lines += _group(group)
    lines += recorded.markdown(report, grid_lines)
    if report.unfinished:
        lines += _grid(table.unfinished_grid(report.unfinished))
    if report.skipped:
        lines += ["## Files skipped", "", *(f"- `{line}`" for line in report.skipped), ""]
    lines += [*_environment(report), *_commands(report)]
    return "\n".join(lines).rstrip() + "\n"


def render_story(report: Report) -> str:
    """What the suite's rows tell together, as a page of its own."""
    lines = [f"# {report.suite.story}: {words.summary(report)}", ""]
    for grid in stories.told(report):
        lines += _grid(grid)
    lines += [f"> {words.stamp(group)}" for group in report.groups[:1]]
    lines += ["", f"{words.setting(report.groups[0])}." if report.groups else "", ""]
    return "\n".join([*lines, *_environment(report)]).rstrip() + "\n"


def _group(group: Group) -> list[str]:
    lines = [f"## {words.setting(group)}", ""]
    if group.unlike:
        lines += [f"Not ranked with the rows above: {group.unlike}.", ""]
    lines += [f"> **{words.stamp(group)}**", ""]
    lines += [text for warning in words.warnings(group) for text in (f"> {warning}", "")]
    lines += [_answer(answer) for answer in words.answers(group)]
    said = predicted.summary(group)
    lines += [f"- {said}"] if said else []
    lines += ["", *_fits(group), f"Reference row: `{group.reference.label}`.", ""]
    grids = table.group_grids(group)
    lines += [*grid_lines(grids["ranking"]), "", grids["ranking"].note, ""]
    for key in SHOWN:
        if grids[key].lines:
            lines += _grid(grids[key], "###")
    return lines


def _answer(answer: words.Answer) -> str:
    name = f"`{answer.row.label}`: " if answer.row else ""
    return f"- **{answer.question}**: {name}{answer.text}"


def _fits(group: Group) -> list[str]:
    found = words.fits(group)
    if not found:
        return []
    lines = ["| Fits in GiB | Fastest recipe | Samples/s | Needs GiB |", "|--:|---|--:|--:|"]
    rates = units.column("rate", [f.row and f.row.numbers.samples_per_second for f in found])
    needs = units.column("gib", [f.row and f.row.numbers.need_bytes for f in found])
    for fit, rate, need in zip(found, rates, needs, strict=True):
        name = f"`{fit.row.label}`" if fit.row else "nothing measured fits"
        lines.append(f"| {fit.sizes} | {name} | {rate} | {need} |")
    return [*lines, ""]


def _grid(grid: table.Grid, head: str = "##") -> list[str]:
    note = [grid.note, ""] if grid.note else []
    if grid.folded:
        fold = f"<details><summary>{grid.title}</summary>"
        return [fold, "", *grid_lines(grid), "", *note, "</details>", ""]
    return [f"{head} {grid.title}", "", *grid_lines(grid), "", *note]


def grid_lines(grid: table.Grid) -> list[str]:
    """A table's lines; numbers to the right."""
    rules = ["---" if kind in units.TEXT else "--:" for kind in grid.kinds]
    lines = [_line(grid.heads), f"|{'|'.join(rules)}|"]
    for cells, marks in zip(grid.lines, grid.marks, strict=True):
        strong = "alarm" in marks
        lines.append(_line([_cell(c, h, strong) for c, h in zip(cells, grid.heads, strict=True)]))
    return lines


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str, head: str, strong: bool) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    if head == "Recipe":
        return f"`{text}`"
    return f"**{text}**" if strong and "DIFFERS" in text else text


def _environment(report: Report) -> list[str]:
    lines = []
    for group in report.groups:
        facts = surroundings.merged(group.rows)
        shown = [f"{name} {' / '.join(values)}" for name, values in facts.items()]
        lines += [f"- {', '.join(shown)}"] if shown else []
    return ["## Environment", "", *dict.fromkeys(lines), ""] if lines else []


def _commands(report: Report) -> list[str]:
    every = [(row.label, row.first.command) for group in report.groups for row in group.rows]
    every += [(gone.label, gone.result.command) for gone in report.unfinished]
    found = [f"# {label}\n{command}" for label, command in every if command]
    return ["## Commands", "", "```sh", *found, "```", ""] if found else []

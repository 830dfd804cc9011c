"""Charts of analyses, beside their tables: by depth, by batch, and by the number of processes."""

from __future__ import annotations

from harness.analyses import claim_rules, scale, suites
from harness.report.data.lookup import Rows
from harness.report.data.rows import Report
from harness.report.figures import numbers, units
from harness.report.rendering.charts import line_style
from harness.report.rendering.svg import WIDTH, Scale, axes, element, picture, polyline

Lines = dict[str, list[tuple[int, float]]]
"""Recipe -> (depth or batch, value) of its points."""


def of_depth(report: Report) -> list[tuple[str, str, str]]:
    points_of = suites.series(report)
    if not points_of:
        return []
    small = "one step; both axes logarithmic"
    memory = {r: [(p.at, p.beyond / units.MIB) for p in line] for r, line in points_of.items()}
    work = {r: suites.work(line) for r, line in points_of.items()}
    seconds = {r: [(p.at, p.seconds) for p in line] for r, line in points_of.items()}
    alike = f"{small}; equal ones lie on one line"
    drawn = {"Memory beyond the state": (small, memory, "MiB"),
             "Forward passes of blocks": (alike, work, "block forwards"),
             "Seconds a step": (small, seconds, "seconds")}  # fmt: skip
    return [
        (caption, note, _chart(lines, ("blocks", name), log=True))
        for caption, (note, lines, name) in drawn.items()
    ]


def sweep_lines(report: Report) -> Lines:
    """Return recipe -> (batch, peak in % of its base's), for recipes with several batches."""
    found = claim_rules.sweeps(Rows(report))
    lines = {r: [(p.at, 100 * p.ours / p.base) for p in s.peaks] for (r, _), s in found.items()}
    return {recipe: line for recipe, line in lines.items() if len(line) > 1}


def of_claims(report: Report) -> list[tuple[str, str, str]]:
    lines = sweep_lines(report)
    if not lines:
        return []
    small = "% of what each is compared with, at an equal global batch; batches logarithmic"
    curves = _chart(lines, ("global batch", "% of the peak"))
    return [("A step's peak against the batch", small, curves)]


def scaling_recipes(report: Report) -> list[str]:
    """Return the recipes of all lines, in order."""
    found = [line.recipe for of in _scaled(report).values() for line in of]
    return list(dict.fromkeys(found))


def _scaled(report: Report) -> dict[tuple[str, str], list[numbers.Line]]:
    """Return (regime, source) -> measured lines."""
    found = {(r, "measured"): scale.measured_lines(report, r) for r in numbers.REGIMES}
    return {key: lines for key, lines in found.items() if lines}


def of_scale(report: Report) -> list[tuple[str, str, str]]:
    order, shared = scaling_recipes(report), scale.shared(report)
    found = []
    for (regime, where), lines in _scaled(report).items():
        cores = shared and where == "measured"
        small = "of one process's samples/s, on the same cores" if cores else "samples/s of a GPU"
        none = {recipe: [] for recipe in order}  # colours follow the order
        shares = none | {line.recipe: _shares(line, cores) for line in lines}
        drawn = _chart(shares, ("processes", "%"))
        found.append((f"{regime.capitalize()} scaling, {where}", small, drawn))
        peaks = none | {line.recipe: _peaks(line) for line in lines}
        name = "Memory of a process" if where == "measured" else "Memory of a GPU"
        drawn = _chart(peaks, ("processes", "GiB"))
        found.append((f"{name}: {regime}, {where}", "", drawn))
    return [picture for picture in found if picture[2]]


def _shares(line: numbers.Line, cores: bool) -> list[tuple[int, float]]:
    pairs = [(p.count, line.base and numbers.efficiency(p, line.base, cores)) for p in line.points]
    own = [] if line.base in (None, *line.points) else [(line.base.count, 100.0)]
    return own + [(count, 100 * share[1]) for count, share in pairs if share]


def _peaks(line: numbers.Line) -> list[tuple[int, float]]:
    found = [(p.count, scale.bytes_of(p)) for p in line.points]
    return [(count, size / units.GIB) for count, size in found if size]


def _chart(lines: Lines, names: tuple[str, str], *, log: bool = False) -> str:
    """Draw values on a logarithmic x axis; ``log``: also on a logarithmic y axis."""
    every = [point for points in lines.values() for point in points]
    if not every:
        return ""
    places, values = zip(*every, strict=True)
    marks = tuple(sorted(set(places)))
    x = Scale(marks[0] * 0.9, marks[-1] * 1.1, 56.0, WIDTH - 10, log=True, marks=marks)
    low, high = (min(values) * 0.8, max(values) * 1.25) if log else (0.0, max(values) * 1.05)
    y = Scale(low, high, 220.0, 26.0, log=log)
    parts = axes(x, y, *names, y.end)
    for index, (recipe, points) in enumerate(lines.items()):
        colour, dash = line_style(index)
        spots = [(x(d), y(v)) for d, v in points]
        if not spots:
            continue
        tip = element("title", recipe)
        look = {"stroke": colour, "stroke_dasharray": dash or None, "class_": "curve"}
        parts.append(element("path", tip, d=polyline(spots), **look))
        parts += [element("circle", cx=a, cy=b, r=2.5, fill=colour) for a, b in spots]
    title = f"{names[1]} against {'depth' if names[0] == 'blocks' else names[0]}"
    return picture(WIDTH, 260, parts, title)

"""Analyses of single suites: depth, each technique alone, the ladder of techniques, long samples,
vocabularies, and fast-DiT's published table.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.data.feed import check_data
from harness.report.data import lookup
from harness.report.data.grid import Grid, text_grid
from harness.report.data.lookup import Missing, Rows, beyond_state, state_bytes, step_bytes
from harness.report.data.rows import Report, Row
from harness.report.figures import derive, units
from harness.report.figures.floor import Floor, Runs, swing
from harness.subjects.dit.presets import shape_of

NOTE = (
    "L: blocks. Memory: the most that one step held beyond parameters, gradients, "
    "optimizer state and average. Added by a block: between the two deepest models. "
    "Powers: least squares through the logarithms. One block's own activations, which "
    "every regime computes, and memory that does not depend on depth lower them. "
    "Forwards a block: counted in one step, in the shallowest and in the deepest model; "
    "times the blocks, it is the work of the forward passes. The number behind +-: the "
    "uncertainty of the power of time from the noise floor, if a row was measured more "
    "than once."
)


@dataclass(frozen=True)
class Point:
    """One row of a recipe.

    ``at``: blocks, or tokens in the ``long`` analysis. ``beyond``: bytes beyond the state.
    ``seconds``: of a step. ``forwards``: forward passes of a block in one step (None: unknown).
    ``runs``: timed steps. ``floor``: noise floor of the row's group.
    """

    at: int
    beyond: float
    seconds: float
    forwards: float | None
    runs: Runs = ()
    floor: Floor | None = None


def tables(report: Report) -> list[Grid]:
    """Return a line for each recipe: memory at each depth, its growth, and the work."""
    points_of = series(report)
    depths = sorted({p.at for points in points_of.values() for p in points})
    columns = [_at(depth, points_of, "mib", lambda p: p.beyond) for depth in depths]
    columns.append(units.column("mib", [_added(points) for points in points_of.values()]))
    lines = [
        [recipe, *cells, *_growth(points_of[recipe])]
        for recipe, *cells in zip(points_of, *columns, strict=True)
    ]
    kinds = {"Recipe": "text", **{f"L={d} MiB": "mib" for d in depths}}
    kinds |= {"Added by a block MiB": "mib", "Memory ~ L^": "ratio", "Forwards a block": "text"}
    kinds |= {"Forward work ~ L^": "ratio", "Step time ~ L^": "text"}
    return [text_grid("depth", "Memory and work against depth", kinds, lines, NOTE)]


def _at(
    at: int, points_of: dict[str, list[Point]], kind: str, take: Callable[[Point], float]
) -> list[str]:
    """Return the cells of one depth or length: each recipe's value, or a dash."""
    values = [{p.at: take(p) for p in points} for points in points_of.values()]
    return units.column(kind, [of.get(at) for of in values])


def _growth(points: list[Point]) -> list[str]:
    ends = dict.fromkeys(units.one("ratio", p.forwards) for p in (points[0], points[-1]))
    memory = power([(p.at, p.beyond) for p in points])
    return [memory, " to ".join(ends), power(work(points)), time_power(points)]


def _added(points: list[Point]) -> float | None:
    """Return the bytes that each block adds, from the two deepest models."""
    if len(points) < 2:
        return None
    low, high = points[-2:]
    return (high.beyond - low.beyond) / (high.at - low.at)


def work(points: list[Point]) -> list[tuple[int, float]]:
    """Return (depth, forward passes of all blocks in one step) of each point with known passes."""
    return [(p.at, p.at * p.forwards) for p in points if p.forwards]


def power(points: list[tuple[int, float]]) -> str:
    """Return the power of depth with which a value grows; a dash for a single model."""
    if len(points) < 2:
        return units.NONE
    return units.one("ratio", derive.power(*zip(*points, strict=True)))


def time_power(points: list[Point]) -> str:
    """Return the power with which a step's seconds grow, and its spread by the noise floor."""
    found = power([(p.at, p.seconds) for p in points])
    floors = [p.floor for p in points]
    if len(points) < 2 or None in floors:
        return found
    logs = [math.log(p.at) for p in points]
    middle = statistics.fmean(logs)
    square = sum((x - middle) ** 2 for x in logs)
    # The slope is a sum of the logarithms of the seconds with these weights.
    weighted = [((x - middle) / square, p.runs) for x, p in zip(logs, points, strict=True)]
    spread = max(swing(floor, weighted) for floor in floors)
    return f"{found} +- {units.one('ratio', spread)}"


def series(report: Report, at: Callable[[Row], int] | None = None) -> dict[str, list[Point]]:
    """Return recipe -> its points in the suite's order, by ``at`` (None: by depth).

    Rows that were not traced are left out.
    """
    at = at or (lambda row: shape_of(row.spec.model).depth)
    rows = [row for group in report.groups for row in group.rows]
    order = {recipe: place for place, recipe in enumerate(report.suite.order)}
    points_of: dict[str, list[Point]] = {}
    for row in sorted(rows, key=lambda r: (order.get(r.spec.recipe, len(order)), at(r))):
        try:
            beyond = beyond_state(row)
        except Missing:
            continue
        facts = row.first.evidence.get("checkpoint")
        forwards = 1.0 if facts is None else facts.get("block_forwards")
        median = row.numbers.step_seconds_median
        point = Point(at(row), beyond, median, forwards, row.runs, row.floor)
        points_of.setdefault(row.spec.recipe, []).append(point)
    return points_of


# ---- each ----
# The change of a step's peak and speed by each technique alone.


EACH_KINDS = {
    "Recipe": "text",
    "Peak GiB": "gib",
    "State in it GiB": "gib",
    "Most beyond GiB": "gib",
    "Saved": "percent",
    "Samples/s": "rate",
    "Speed x": "ratio",
    "Losses": "text",
}


def each_tables(report: Report) -> list[Grid]:
    """Return rows in the suite's order, each compared with the reference."""
    rows, lines = Rows(report), []
    for recipe in report.suite.order:
        try:
            lines.append(_against(rows.get(recipe), rows.get(report.suite.reference)))
        except Missing as missing:
            lines.append([recipe, *[units.NONE] * 6, str(missing)])
    note = (
        "Peak of one step. State: parameters, gradients, optimizer state and average alive at "
        "that peak. Most beyond: of activations and temporaries at any instant, so the two need "
        f"not add up. Saved and speed: against {report.suite.reference}. A row of one process "
        "trains the whole batch alone."
    )
    return [text_grid("each", "Each against the reference", EACH_KINDS, lines, note)]


def _against(row: Row, reference: Row) -> list[str]:
    """Return a cell for each of ``EACH_KINDS``: a row against its reference."""
    sizes = [_or_none(measure, row) for measure in (step_bytes, state_bytes, beyond_state)]
    peak, reference_peak = sizes[0], _or_none(step_bytes, reference)
    rate = row.numbers.samples_per_second
    saved = ratio = units.NONE
    if row is not reference:
        ratio = units.one("ratio", lookup.ratio(row, reference))
        if peak is not None and reference_peak is not None:
            saved = units.one("change", peak / reference_peak - 1) + " %"
    cells = [units.one("gib", size) for size in sizes]
    return [row.label, *cells, saved, units.one("rate", rate), ratio, row.versus.parity]


def _or_none(measure: Callable[[Row], int], row: Row) -> int | None:
    """Return bytes, or None for a row that was not traced (a compiled one cannot be)."""
    with contextlib.suppress(Missing):
        return measure(row)
    return None


# ---- ladder ----
# Each row keeps the techniques of the rows above it and adds one.


LADDER_KINDS = {
    "What was added": "text",
    "Peak GiB": "gib",
    "Whole run GiB": "gib",
    "Saved by it": "percent",
    "Saved in all": "percent",
    "Samples/s": "rate",
    "Speed x": "ratio",
    "Losses": "text",
}
LADDER_NOTE = (
    "Each row keeps the techniques of the rows above, unless it replaces one. Peak: live "
    "tensors on the device in a step; saved: relative to that. Whole run: free memory "
    "that a GPU must have; on a CPU, the resident mark of a process with loading and "
    "libraries. Speed is relative to the row above, and shown if the noise does not "
    "explain it."
)


def ladder(report: Report) -> list[Grid]:
    """Return rows in the suite's order, each compared with the last measured row above it."""
    rows, lines, above, first = Rows(report), [], None, None
    for recipe in report.suite.order:
        try:
            row = rows.get(recipe)
            lines.append(_rung(row, above, first))
            above, first = row, first or row
        except Missing as missing:
            lines.append([f"+ {recipe}", *[units.NONE] * 6, str(missing)])
    return [text_grid("ladder", "The ladder", LADDER_KINDS, lines, LADDER_NOTE)]


def _rung(row: Row, above: Row | None, first: Row | None) -> list[str]:
    size = step_bytes(row)
    pace = units.one("rate", row.numbers.samples_per_second)
    numbers = row.numbers
    whole = numbers.need_bytes if row.first.meter == "cuda" else numbers.resident_peak_bytes
    cells = [_ladder_added(row, above), *(units.one("gib", b) for b in (size, whole))]
    if above is None or first is None:
        return [*cells, units.NONE, units.NONE, pace, units.NONE, row.versus.parity]
    saved = [units.one("change", size / step_bytes(other) - 1) + " %" for other in (above, first)]
    ratio = units.one("ratio", lookup.ratio(row, above))
    return [*cells, *saved, pace, ratio, row.versus.parity]


def _ladder_added(row: Row, above: Row | None) -> str:
    if above is None:
        return row.label
    here, there = (r.spec.recipe.split("+") for r in (row, above))
    new, gone = [p for p in here if p not in there], [p for p in there if p not in here]
    return f"+ {', '.join(new)}" + (f" (in place of {', '.join(gone)})" if gone else "")


# ---- long samples ----
# Memory and time of a step by the tokens of a sample.


LONG_NOTE = (
    "T: tokens of a sample. Memory: the most that one step held beyond parameters, "
    "gradients, optimizer state and average, on the fullest rank. Ranks that share "
    "samples (sp) hold a part of the tokens each. All rows take the same number of "
    "samples a step. Powers: least squares through the logarithms; memory and time that "
    "do not depend on tokens lower them. The number behind +-: the uncertainty of the "
    "power of time from the noise floor, if a row was measured more than once."
)


def long_tables(report: Report) -> list[Grid]:
    """Return a line for each recipe: memory beyond the state, time, and the growth of both."""
    points_of = series(report, tokens)
    rows = [row for group in report.groups for row in group.rows]
    processes = {row.spec.recipe: row.spec.processes for row in rows}
    lengths = sorted({p.at for points in points_of.values() for p in points})
    columns = [_at(length, points_of, "mib", lambda p: p.beyond) for length in lengths]
    columns += [_at(length, points_of, "ms", lambda p: p.seconds) for length in lengths]
    lines = []
    for recipe, *cells in zip(points_of, *columns, strict=True):
        memory = power([(p.at, p.beyond) for p in points_of[recipe]])
        growth = [memory, time_power(points_of[recipe])]
        lines.append([recipe, str(processes[recipe]), *cells, *growth])
    kinds = {"Recipe": "text", "Processes": "count", **{f"T={n} MiB": "mib" for n in lengths}}
    kinds |= {f"T={n} ms": "ms" for n in lengths}
    kinds |= {"Memory ~ T^": "ratio", "Step time ~ T^": "text"}
    return [text_grid("long", "Memory a rank and time against tokens", kinds, lines, LONG_NOTE)]


def tokens(row: Row) -> int:
    """Return the tokens of one sample of a DiT's row."""
    of_frame = shape_of(row.spec.model).tokens(check_data(row.spec.data).input_size)
    return of_frame * max(1, row.spec.frames)


# ---- vocabulary ----
# The saving of a loss without all logits, by vocabulary.


MATTERS = 0.10
"""Share of a peak from which a saving counts."""
VOCABULARY_KINDS = {"Vocabulary": "text", **EACH_KINDS}


def vocabulary_tables(report: Report) -> list[Grid]:
    """Return rows by vocabulary, each compared with the reference of the same vocabulary."""
    rows, lines = Rows(report), []
    saved: dict[str, dict[int, float]] = {}
    specs = [row.spec for row in rows.rows] + [ended.result.spec for ended in report.unfinished]
    for words, model in sorted({_words(spec.model): spec.model for spec in specs}.items()):
        for recipe in dict.fromkeys(report.suite.order):
            try:
                row, base = (rows.get(r, model=model) for r in (recipe, report.suite.reference))
            except Missing as missing:
                dashes = [units.NONE] * (len(VOCABULARY_KINDS) - 3)
                lines.append([f"{words:,}", recipe, *dashes, str(missing)])
                continue
            lines.append([f"{words:,}", *_against(row, base)])
            with contextlib.suppress(Missing):  # an untraced row has no known saving
                if row is not base:
                    share = rows.saved(recipe, report.suite.reference, model=model)
                    saved.setdefault(recipe, {})[words] = share
    return [
        text_grid("vocabulary", "Memory against vocabulary", VOCABULARY_KINDS, lines, _note(saved))
    ]


def _words(model: str) -> int:
    """Return the vocabulary size in a model's name; 0 without one."""
    found = re.search(r"tokens=(\d+)", model)
    return int(found[1]) if found else 0


def _note(saved: dict[str, dict[int, float]]) -> str:
    found = "; ".join(f"{recipe} {judged(shares)}" for recipe, shares in saved.items())
    return (
        "Peak of one step. Saved and speed: against all logits at the same vocabulary. The "
        f"claim, that a loss without them saves memory (a share of {MATTERS:.0%} or more): "
        f"{found or 'nothing to judge it by was measured'}."
    )


def judged(shares: dict[int, float]) -> str:
    """Return in words the vocabularies at which a recipe saves enough."""
    enough = sorted(words for words, share in shares.items() if share >= MATTERS)
    if not enough:
        return f"at no vocabulary up to {max(shares):,}"
    others = max((words for words in shares if words not in enough), default=0)
    if not others:
        return f"at every vocabulary from {enough[0]:,} on"
    if others < enough[0]:
        return f"from {enough[0]:,} words on, not at {others:,}"
    return f"at {', '.join(f'{words:,}' for words in enough)} words alone"


# ---- fast-DiT ----
# The table of fast-DiT's README, and the same techniques measured here.


PUBLISHED = (
    # checkpointing, mixed precision, features extracted before; steps/s, MB of device memory
    (False, False, False, None, None),
    (True, False, False, 0.43, 44045),
    (True, True, False, 0.56, 40461),
    (True, True, True, 0.84, 27485),
)
"""Source: github.com/chuanyangjin/fast-DiT, README: DiT-XL/2, global batch 128, one A100."""
FAST_DIT_KINDS = {
    "Checkpointing": "text",
    "Mixed precision": "text",
    "Pre-extracted": "text",
    "Published steps/s": "rate",
    "Published MB": "count",
    "Steps/s here": "rate",
    "Speed x": "ratio",
    "Needs here": "gib",
}
FAST_DIT_NOTE = (
    "Published: fast-DiT's README, DiT-XL/2 at a global batch of 128 on one A100. Without "
    "pre-extraction a VAE encodes images in every step; its weights are random, which changes "
    "neither memory nor speed. Speed: against the row above that was measured, where the noise "
    "does not explain it. Model, batch and device of these rows are named below."
)


CAREFUL = {
    "Recipe": "text",
    "Steps/s here": "rate",
    "Speed x": "ratio",
    "Needs here": "gib",
    "Against theirs %": "change",
}
CAREFUL_NOTE = (
    "Variants of the last published row: gradients freed before the next step's passes, "
    "fused attention without a score matrix, and the average in host memory."
)


def fast_dit_tables(report: Report) -> list[Grid]:
    """Return the published rows beside the suite's first ones, then the suite's further rows."""
    published, behind = report.suite.order[: len(PUBLISHED)], report.suite.order[len(PUBLISHED) :]
    grids = [_published(Rows(report), published)]
    if behind:
        grids.append(_careful(Rows(report), published[-1], behind))
    return grids


def _published(rows: Rows, order: Sequence[str]) -> Grid:
    lines, above = [], None
    for published, recipe in zip(PUBLISHED, order, strict=False):
        marks = ["yes" if on else "no" for on in published[:3]]
        theirs = ["out of memory"] * 2 if published[3] is None else [str(v) for v in published[3:]]
        try:
            row = _here(rows, recipe, extracted=published[2])
            lines.append([*marks, *theirs, *_cells(row, above)])
            above = row
        except Missing as missing:
            lines.append([*marks, *theirs, str(missing), units.NONE, units.NONE])
    return text_grid("fast_dit", "The fast-DiT table", FAST_DIT_KINDS, lines, FAST_DIT_NOTE)


def _careful(rows: Rows, theirs: str, behind: Sequence[str]) -> Grid:
    lines, above = [], None
    for recipe in (theirs, *behind):
        try:
            row = _here(rows, recipe, extracted=True)
        except Missing as missing:
            lines.append([recipe, str(missing), *[units.NONE] * 3])
            continue
        above = above or row
        less = row.numbers.need_bytes / above.numbers.need_bytes - 1
        saved = units.NONE if row is above else units.one("change", less)
        lines.append([recipe, *_cells(row, None if row is above else above), saved])
    return text_grid("careful", "A careful trainer", CAREFUL, lines, CAREFUL_NOTE)


def _here(rows: Rows, recipe: str, *, extracted: bool) -> Row:
    """Return the suite's row of a recipe, with a VAE in its step or without."""
    return rows.get(recipe, data=lambda data: data.startswith("vae") is not extracted)


def _cells(row: Row, above: Row | None) -> list[str]:
    """Return steps/s, their ratio to the row above, and the need."""
    seconds = row.numbers.step_seconds_median
    ratio = units.NONE if above is None else units.one("ratio", lookup.ratio(row, above))
    return [units.one("rate", 1 / seconds), ratio, units.gib(row.numbers.need_bytes)]

"""What the rows of one suite tell together: a table or two before the ranking.

A suite names its story (``story: ladder``); each is a function of the report's rows.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.report import claim_rules, claim_verdicts, claims, depth, units
from harness.report.lookup import Missing, Rows, beyond_state, state_bytes, step_bytes
from harness.report.rows import Report, Row
from harness.report.table import Grid

__all__ = ["STORIES", "drawn", "told"]

DASH = units.NONE


def told(report: Report) -> list[Grid]:
    """The tables of the suite's story; none where it has none."""
    tell = STORIES.get(report.suite.story)
    return tell(report) if tell else []


def drawn(report: Report) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """The pictures of the story (caption, small print, SVG), and the keys of their lines."""
    if report.suite.story != "depth":
        return [], []
    return depth.charts(report), depth.keys(report)


def _grid(key: str, title: str, columns: dict[str, str], lines: list[list[str]], note: str) -> Grid:
    """``columns``: head -> kind."""
    return Grid(
        key=key,
        title=title,
        heads=list(columns),
        kinds=list(columns.values()),
        lines=lines,
        marks=[() for _ in lines],
        note=note,
    )


# ---- claims ----


def _claims(report: Report) -> list[Grid]:
    lines = []
    for number, (claim, finding) in enumerate(claims.judge(report), 1):
        verdict = finding.verdict.value + (f" {finding.condition}" if finding.condition else "")
        lines.append([str(number), claim.says, claim.where, verdict, finding.numbers])
    columns = dict.fromkeys(("Claim", "Who says so", "Verdict", "Measured"), "text")
    thresholds = (claim_verdicts.MUCH, claim_verdicts.HALF, claim_verdicts.FRACTION)
    much, half, fraction, some = map(claim_verdicts.share, (*thresholds, claim_verdicts.SOME))
    note = (
        "Peaks are those of one training step: the allocator's on a GPU, the traced tensors' "
        "without one. Each verdict is about the model and machine named below, at the batches it "
        f"names (else {claim_rules.LARGE}). Much, or medium: from {much} of the peak on; half: "
        f"from {half}; down to a fraction: from {fraction}; any: from {some}. Speeds are of the "
        "few steps that each row took: other work on the machine shows in them."
    )
    return [_grid("claims", "Claims, measured", {"#": "count", **columns}, lines, note)]


# ---- ladder ----


def _ladder(report: Report) -> list[Grid]:
    """Rows in the suite's order, each against the one above that was measured."""
    rows, lines, last, first = Rows(report), [], None, None
    for recipe in report.suite.order:
        try:
            row = rows.get(recipe)
            lines.append(_rung(row, last, first))
            last, first = row, first or row
        except Missing as missing:
            lines.append([f"+ {recipe}", *[DASH] * 5, str(missing)])
    columns = {
        "What was added": "text",
        "Peak GiB": "gib",
        "Saved by it": "percent",
        "Saved in all": "percent",
        "Samples/s": "rate",
        "Speed x": "ratio",
        "Losses": "text",
    }
    note = (
        "Each row keeps what the rows above it brought; a technique in place of another cannot "
        "stand beside it. Peak of one step; speed against the row above."
    )
    return [_grid("ladder", "The ladder", columns, lines, note)]


def _rung(row: Row, last: Row | None, first: Row | None) -> list[str]:
    size = step_bytes(row)
    rate = row.numbers.samples_per_second
    cells = [_added(row, last), units.one("gib", size)]
    if last is None or first is None:
        return [*cells, DASH, DASH, units.one("rate", rate), DASH, _parity(row)]
    saved = [units.one("change", size / step_bytes(other) - 1) + " %" for other in (last, first)]
    pace = units.one("ratio", rate / last.numbers.samples_per_second)
    return [*cells, *saved, units.one("rate", rate), pace, _parity(row)]


def _added(row: Row, last: Row | None) -> str:
    if last is None:
        return row.label
    here, there = (r.spec.recipe.split("+") for r in (row, last))
    new, gone = [p for p in here if p not in there], [p for p in there if p not in here]
    return f"+ {', '.join(new)}" + (f" (in place of {', '.join(gone)})" if gone else "")


def _parity(row: Row) -> str:
    return row.versus.parity if row.versus else DASH


# ---- each row against the reference ----


def _each(report: Report) -> list[Grid]:
    """Rows in the suite's order: what each technique alone saves of a step's peak, and costs."""
    rows, lines = Rows(report), []
    for recipe in report.suite.order:
        try:
            lines.append(_against(rows.get(recipe), rows.get(report.suite.reference)))
        except Missing as missing:
            lines.append([recipe, *[DASH] * 6, str(missing)])
    columns = {
        "Recipe": "text",
        "Peak GiB": "gib",
        "State in it GiB": "gib",
        "Most beyond GiB": "gib",
        "Saved": "percent",
        "Samples/s": "rate",
        "Speed x": "ratio",
        "Losses": "text",
    }
    note = (
        "Peak of one step. State: parameters, gradients, optimizer state and average alive at "
        "that peak. Most beyond: of activations and temporaries at any instant, so the two need "
        f"not add up. Saved and speed: against {report.suite.reference}. A row of one process "
        "trains the whole batch alone."
    )
    return [_grid("each", "Each against the reference", columns, lines, note)]


def _against(row: Row, reference: Row) -> list[str]:
    measured = [_or_none(measure, row) for measure in (step_bytes, state_bytes, beyond_state)]
    sizes, size = [units.one("gib", value) for value in measured], measured[0]
    base, rate = _or_none(step_bytes, reference), row.numbers.samples_per_second
    saved = pace = DASH
    if row is not reference:
        pace = units.one("ratio", rate / reference.numbers.samples_per_second)
        if size is not None and base is not None:
            saved = units.one("change", size / base - 1) + " %"
    return [row.label, *sizes, saved, units.one("rate", rate), pace, _parity(row)]


def _or_none(measure: Callable[[Row], int], row: Row) -> int | None:
    """Bytes, or None for a row that was not traced (a compiled one cannot be)."""
    try:
        return measure(row)
    except Missing:
        return None


# ---- the table of fast-DiT ----

PUBLISHED = (
    # checkpointing, mixed precision, features extracted before; steps/s, MB of device memory
    (False, False, False, None, None),
    (True, False, False, 0.43, 44045),
    (True, True, False, 0.56, 40461),
    (True, True, True, 0.84, 27485),
)
"""github.com/chuanyangjin/fast-DiT, README: DiT-XL/2, global batch 128, one A100."""


def _fast_dit(report: Report) -> list[Grid]:
    lines = []
    rows = Rows(report)
    for published, recipe in zip(PUBLISHED, report.suite.order, strict=False):
        marks = ["yes" if on else "no" for on in published[:3]]
        theirs = ["out of memory"] * 2 if published[3] is None else [str(v) for v in published[3:]]
        try:
            extracted = published[2]
            row = rows.get(recipe, data=lambda d, e=extracted: d.startswith("vae") is not e)
            seconds = row.numbers.step_seconds_median
            ours = [units.one("rate", 1 / seconds), units.gib(row.numbers.need_bytes)]
        except Missing as missing:
            ours = [str(missing), DASH]
        lines.append([*marks, *theirs, *ours])
    columns = {
        "Checkpointing": "text",
        "Mixed precision": "text",
        "Pre-extracted": "text",
        "Published steps/s": "rate",
        "Published MB": "count",
        "Steps/s here": "rate",
        "Needs here": "gib",
    }
    note = (
        "Published: fast-DiT's README, DiT-XL/2 at a global batch of 128 on one A100. Without "
        "pre-extraction a VAE encodes images in every step; its weights are random, which changes "
        "neither memory nor speed. Model, batch and device of these rows are named below."
    )
    return [_grid("fast_dit", "The fast-DiT table", columns, lines, note)]


STORIES: dict[str, Callable[[Report], list[Grid]]] = {
    "claims": _claims,
    "each": _each,
    "ladder": _ladder,
    "fast_dit": _fast_dit,
    "depth": depth.tables,
}

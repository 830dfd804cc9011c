"""The ``sampled`` and ``quality`` analyses: memory by distance of samples, claims on inference.

A claim on memory is judged over its rows' batches: at few samples weights are most of the peak,
at many activations are. A claim on quality is judged by a classifier of digits: its answer
counts, not the distance of latents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from harness.analyses import claims
from harness.analyses.claim_sweeps import (
    HALF,
    SOME,
    Judgement,
    Rule,
    Verdict,
    change,
    kinds_judged,
    share,
    swept,
)
from harness.analyses.fits import Band
from harness.report.data import lookup
from harness.report.data.grid import Grid, text_grid
from harness.report.data.lookup import Missing, Rows
from harness.report.data.rows import Report, Row
from harness.report.figures import derive, units

# ---- sampled ----
# Memory by distance of the samples, and by speed.


RECIPE, FRONT = "Recipe", "Front"
KINDS = {
    RECIPE: "text",
    "Peak MiB": "mib",
    "Weights MiB": "mib",
    "Peak vs ref": "change",
    "Weights vs ref": "change",
    "Samples/s": "rate",
    "Speed x": "ratio",
    "Latency of one ms": "ms",
    "Samples": "text",
    "PSNR dB": "ratio",
    "Recognised %": "percent",
    "As reference's %": "percent",
    FRONT: "text",
}
NOTE = (
    "Peak: live tensors at the fullest instant of a batch, of which weights are the "
    "parameters as stored. Samples: equal to the reference's within rounding, or the "
    "relative L2 distance of their latents. Recognised, for digits: the share in which a "
    "classifier sees the requested class. As reference's: the share in which it sees the "
    "same class as in the reference's sample. Front: no other row has both a smaller "
    "peak and samples that are as near."
)


def sampled_tables(report: Report) -> list[Grid]:
    """Return rows in the suite's order, each compared with the reference."""
    rows, lines, marked = Rows(report), [], front(report)
    batch = report.groups[0].reference.spec.global_batch if report.groups else None
    for recipe in dict.fromkeys(report.suite.order):
        try:
            row = rows.get(recipe, global_batch=batch)
            cells = _cells(row, rows.get(report.suite.reference, global_batch=batch))
            lines.append(cells | {FRONT: "front" if id(row) in marked else ""})
        except Missing as missing:
            lines.append({RECIPE: recipe, FRONT: str(missing)})
    kept = {head: kind for head, kind in KINDS.items() if any(line.get(head) for line in lines)}
    texts = [[line.get(head) or ("" if head == FRONT else units.NONE) for head in kept]
             for line in lines]  # fmt: skip
    return [text_grid("sampled", "Memory against samples", kept, texts, NOTE)]


def front(report: Report) -> set[int]:
    """Return the ids of rows on the Pareto front of peak and distance, in the reference's group."""
    rows, points = [], []
    for row in report.groups[0].rows if report.groups else ():
        known = row.drawn and (row.versus.is_reference or row.drawn.away)
        if known and not row.versus.wrong and row.numbers.peak_bytes is not None:
            equal = row.versus.is_reference or row.versus.parity == "equal"
            far = 0.0 if equal else row.drawn.away.relative
            rows.append(row)
            points.append((row.numbers.peak_bytes, -far))  # larger second values are better
    return {id(rows[index]) for index in derive.pareto_front(points)}


def _cells(row: Row, reference: Row) -> dict[str, str | None]:
    """Return head -> text; None, or no head, without a value."""
    numbers, drawn = row.numbers, row.drawn
    if drawn is None:
        raise Missing(f"{row.label} drew no samples")
    cells = {RECIPE: row.label} | _sizes(row, reference)
    if row is not reference:
        cells["Speed x"] = units.one("ratio", lookup.ratio(row, reference))
    away = drawn.away
    far = f" {units.one('distance', away.relative)}" if away else ""
    psnr = away and ("same" if math.isinf(away.psnr_db) else units.one("ratio", away.psnr_db))
    shares = {"Recognised %": drawn.recognised, "As reference's %": drawn.agreed}
    return cells | {
        "Samples/s": units.one("rate", numbers.samples_per_second),
        "Latency of one ms": units.one("ms", drawn.latency_seconds),
        "Samples": row.versus.parity + far,
        "PSNR dB": psnr,
        **{head: None if s is None else units.one("percent", s) for head, s in shares.items()},
    }


def _sizes(row: Row, reference: Row) -> dict[str, str | None]:
    """Return the peak, the weights in it, and their changes from the reference."""
    cells = {}
    for head, name in (("Peak", "peak_bytes"), ("Weights", "parameters_bytes")):
        mine, theirs = (getattr(r.numbers, name) for r in (row, reference))
        cells[f"{head} MiB"] = units.one("mib", mine)
        if mine and theirs and row is not reference:
            cells[f"{head} vs ref"] = units.one("change", mine / theirs - 1) + " %"
    return cells


QUARTER, KEPT = 0.7, 0.95
"""The saving from which a quarter is left (as a half is from 0.45), and the kept quality.

Quality is kept from this share of samples that are classified as the reference's are.
"""
BASE, HALVES = "single", "single+bf16_pure"
INSTEAD = f"{BASE}+distilled:student="
BITS = range(8, 1, -1)


def tables(report: Report) -> list[Grid]:
    """Return the table of rows, and each claim with its verdict."""
    rows = Rows(report)
    judged = claims.judged(CLAIMS, rows)
    title = f"Claims on inference, measured on {rows.model}"
    grid = text_grid("drawn_claims", title, claims.KINDS, claims.lines(judged), _note())
    return [*sampled_tables(report), grid]


def _note() -> str:
    half, quarter, kept, some = map(share, (HALF, QUARTER, KEPT, SOME))
    return (
        "Claims are judged for the model, weights and machine of this page, at every "
        "batch measured. Peaks are those of the traced tensors of one batch of samples. "
        f"Half: from {half} saved on. A quarter: from {quarter} on. Quality is kept if a "
        f"classifier sees the same class in at least {kept} of the samples as in the "
        f"reference's. A student keeps it if the classifier recognises at most {some} "
        "fewer samples than of its teacher."
    )


def saves(parts: Sequence[str], least: float) -> Rule:
    """Return a rule: each way to store weights saves ``least`` of the peak with 16-bit weights."""

    def rule(rows: Rows) -> Judgement:
        at = batches(rows, HALVES)
        found = {part: swept(rows, f"{HALVES}+{part}", HALVES, at) for part in parts}
        return kinds_judged(found, Band(least=least), "of {}")

    return rule


def batches(rows: Rows, recipe: str) -> tuple[int, ...]:
    """Return the batches at which a recipe was measured, on the rows' model."""
    alike = (row.spec for row in rows.rows if row.spec.recipe == recipe)
    found = sorted({spec.global_batch for spec in alike if spec.model == rows.model})
    if not found:
        raise Missing(f"{recipe} is not among the results")
    return tuple(found)


def compresses(rows: Rows) -> Judgement:
    """Judge if palettes at least halve the weights themselves."""
    base = weights(rows.get(BASE))
    saved = {bits: 1 - weights(row) / base for bits, row in palettes(rows)}
    texts = [f"{change(-part, -HALF)} in {bits} bits" for bits, part in saved.items()]
    numbers = f"all weights, embedders and last layer too: {', '.join(texts)}"
    return verdict_of({f"{bits} bits": part >= HALF for bits, part in saved.items()}, numbers)


def palettes(rows: Rows) -> list[tuple[int, Row]]:
    """Return bits -> the row of that palette, for each measured one."""
    found = []
    for bits in BITS:
        try:
            found.append((bits, rows.get(f"{BASE}+palette:bits={bits}")))
        except Missing as missing:
            why = missing
    if not found:
        raise why
    return found


def weights(row: Row) -> int:
    """Return the bytes of a row's parameters, as stored.

    Raises:
        Missing: the row was not traced.
    """
    if row.numbers.parameters_bytes is None:
        raise Missing(f"{row.label} was not traced")
    return row.numbers.parameters_bytes


def keep(parts: Iterable[str]) -> Rule:
    """Return a rule: a classifier sees the same in samples of each weight storage and float32."""

    def rule(rows: Rows) -> Judgement:
        found = {part: rows.get(f"{BASE}+{part}") for part in parts}
        shares = {part: agreed(row) for part, row in found.items()}
        texts = [
            f"{part}: {share(shares[part], KEPT)} of {row.spec.global_batch} samples taken for the "
            f"same, {share(row.drawn.recognised)} for what was asked, "
            f"{row.drawn.away.relative:.1e} away"
            for part, row in found.items()
        ]
        return verdict_of({part: s >= KEPT for part, s in shares.items()}, ". ".join(texts))

    return rule


def agreed(row: Row) -> float:
    """Return the share of a row's samples that are classified as the reference's are.

    Raises:
        Missing: the samples were not classified.
    """
    if row.drawn is None or row.drawn.agreed is None:
        raise Missing(f"what {row.label} drew was shown to no classifier, which knows digits alone")
    return row.drawn.agreed


def distilled(rows: Rows) -> Judgement:
    """Judge a student of fewer blocks and its own weights, compared with its teacher."""
    student = _student(rows)
    teacher = rows.get(BASE, global_batch=student.spec.global_batch)
    shares = [row.drawn.recognised for row in (student, teacher)]
    if None in shares:
        raise Missing("no classifier knows these samples")
    smaller = change(weights(student) / weights(teacher) - 1)
    recipe = student.spec.recipe
    who = recipe.removeprefix(INSTEAD) if recipe.startswith(INSTEAD) else student.spec.model
    numbers = (
        f"{who}: {share(shares[0])} of {student.spec.global_batch} samples "
        f"recognised, {share(shares[1])} of its teacher's; weights {smaller}, samples/s "
        f"{rows.rate_ratio(student, teacher)}"
    )
    held = shares[0] >= shares[1] - SOME
    return Judgement(Verdict.HOLDS if held else Verdict.NOT, numbers)


def _student(rows: Rows) -> Row:
    """Return the row of a student: one in its teacher's place, or a smaller model."""
    instead = sorted({r.spec.recipe for r in rows.rows if r.spec.recipe.startswith(INSTEAD)})
    if instead:
        return rows.get(instead[0])
    name = rows.model.partition(":")[0]
    try:
        return rows.get(
            BASE,
            model=lambda model: model != rows.model and model.partition(":")[0] == name,
            weights=bool,
        )
    except Missing:
        text = f"no student of {rows.model} with trained weights is among the results"
        raise Missing(text) from None


def verdict_of(held: dict[str, bool], numbers: str) -> Judgement:
    """Return the verdict if all hold, none, or some, by name."""
    if all(held.values()):
        return Judgement(Verdict.HOLDS, numbers)
    if not any(held.values()):
        return Judgement(Verdict.NOT, numbers)
    some = ", ".join(name for name, it_does in held.items() if it_does)
    return Judgement(Verdict.ONLY, numbers, f"of {some}")


CLAIMS = (
    claims.Claim(
        says="weights in 8 bits halve the memory that 16 bits take",
        where="docs of torchao and bitsandbytes; posts on quantisation",
        rule=saves(("int8", "float8"), HALF),
    ),
    claims.Claim(
        says="weights in 4 bits quarter the memory that 16 bits take",
        where="Dettmers et al. 2023 (arXiv:2305.14314); posts on nf4 checkpoints",
        rule=saves(("nf4", "palette"), QUARTER),
    ),
    claims.Claim(
        says="clustered weights (palettes) compress a model",
        where="Han et al. 2015 (arXiv:1510.00149); coremltools' docs",
        rule=compresses,
    ),
    claims.Claim(
        says="weights in 8 bits keep quality",
        where="docs of torchao and bitsandbytes",
        rule=keep(("int8", "float8", "palette:bits=8")),
    ),
    claims.Claim(
        says="weights in 4 bits keep quality",
        where="posts on nf4 checkpoints; coremltools' docs",
        rule=keep(("nf4", "palette")),
    ),
    claims.Claim(
        says="weights in 3 bits and fewer keep quality",
        where="coremltools' docs on mixed palettes",
        rule=keep(("palette:bits=3", "palette:bits=3,rows=16", "palette:bits=2")),
    ),
    claims.Claim(
        says="distillation to fewer blocks keeps quality",
        where="Hinton et al. 2015 (arXiv:1503.02531); posts on distilled diffusion models",
        rule=distilled,
    ),
)

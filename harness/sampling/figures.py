"""What a row drew against what its reference drew: distances, the limit of equality, the verdict.

For rows that draw samples this takes the place of the parity of losses. Distances are of the kept
latents, of all values together: relative L2 error, and PSNR against the span of the reference's.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.report.figures import derive, parity
from harness.report.figures.parity import Verdict
from harness.result import Result

ROUNDOFF = 2.0**-24
"""Of float32."""
SLACK = 4.0
LOOSEST = 1e-3
"""Where a sampler makes more of a rounding than that, equality says nothing any more: rows further
apart are shown so."""
SAME = ("sampler_steps", "cfg_scale", "seed", "weights", "init", "model", "objective", "data")
"""Of a spec: what decides the samples. Rows that differ in one are not compared."""


@dataclass(frozen=True)
class Distance:
    """How far samples are from the reference's: ``relative`` L2 error of all kept latents, and of
    the ``worst`` sample; ``psnr_db`` in decibels, infinite where they are the same."""

    relative: float
    worst: float
    psnr_db: float


@dataclass(frozen=True)
class DrawnRow:
    """What a row drew, beside its reference: median ``latency_seconds`` of a sample drawn alone,
    the ``limit`` up to which samples would be equal, and how far they are (``away``; None for the
    reference itself, and where ``why_not`` says that they do not compare). Of digits the share of
    samples that a classifier takes for what was asked (``recognised``), and for what it takes the
    reference's sample for (``agreed``)."""

    latency_seconds: float
    evaluations: int
    echo: float
    limit: float
    away: Distance | None
    why_not: str = ""
    recognised: float | None = None
    agreed: float | None = None


def drawn_row(results: Sequence[Result], reference: Result, *, is_reference: bool) -> DrawnRow:
    """Of the repetitions of one row; the furthest of them counts."""
    first = results[0]
    seconds = [s for result in results for s in result.drawn.latency_seconds]
    why = not_comparable(first, reference)
    compared = [] if is_reference or why else [distance(r, reference) for r in results]
    return DrawnRow(
        latency_seconds=derive.quantile(seconds, 0.5),
        evaluations=first.drawn.evaluations,
        echo=first.drawn.echo,
        limit=limit(reference),
        away=max(compared, key=lambda far: far.relative, default=None),
        why_not=why,
        recognised=share_alike(first.drawn.taken_for, first.drawn.labels),
        agreed=share_alike(first.drawn.taken_for, reference.drawn.taken_for) if compared else None,
    )


def share_alike(ours: Sequence[int] | None, theirs: Sequence[int] | None) -> float | None:
    """The share of samples of one class in both; None where one of them is not known."""
    if not ours or not theirs or len(ours) != len(theirs):
        return None
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def latents(result: Result) -> np.ndarray:
    """float64 [B, C, H, W]: the kept samples.

    Raises:
        ValueError: the text is not as many numbers as its shape says.
    """
    raw = base64.b64decode(result.drawn.latents, validate=True)
    return np.frombuffer(raw, "<f4").astype(np.float64).reshape(result.drawn.shape)


def not_comparable(row: Result, reference: Result) -> str:
    """Why two rows' samples are not compared, by the name of what differs; empty where they are."""
    if row.drawn is None or reference.drawn is None:
        return "one of them drew no samples"
    for name in SAME:
        ours, theirs = (_value(r, name) for r in (row, reference))
        if ours != theirs:
            return f"other {name}: {ours}, not {theirs}"
    weights = [r.configs.get("initial_weights") for r in (row, reference)]
    if weights[0] != weights[1] and not parity.replaces_the_model(row):
        return f"other weights: {weights[0]}, not {weights[1]}"
    for name in ("noise", "labels", "shape"):
        if getattr(row.drawn, name) != getattr(reference.drawn, name):
            return f"other {name} of the samples"
    return ""


def _value(result: Result, name: str) -> object:
    spec = result.spec
    asked = {"sampler_steps": spec.drawn_steps, "cfg_scale": spec.scale}
    return asked.get(name, getattr(spec, name))


def distance(row: Result, reference: Result) -> Distance:
    """How far a row's samples are from the reference's; of rows that compare."""
    ours, theirs = latents(row), latents(reference)
    gap, axes = ours - theirs, tuple(range(1, theirs.ndim))
    each = np.sqrt((gap**2).sum(axis=axes)) / np.sqrt((theirs**2).sum(axis=axes))
    mean_square, span = float((gap**2).mean()), float(theirs.max() - theirs.min())
    psnr = math.inf if mean_square == 0 else 10 * math.log10(span**2 / mean_square)
    return Distance(float(np.linalg.norm(gap) / np.linalg.norm(theirs)), float(each.max()), psnr)


def limit(reference: Result) -> float:
    """The relative distance up to which samples of float32 are equal.

    Each product of each evaluation rounds once more, at most by ``ROUNDOFF`` of its size, and the
    roundings of many add up as the root of their number. What the sampler makes of one such
    rounding the reference has measured: its ``echo``, of a last bit of the noise.
    """
    drawn = reference.drawn
    roundings = drawn.evaluations * drawn.products
    return min(LOOSEST, SLACK * max(drawn.echo, ROUNDOFF) * math.sqrt(roundings))


def against(row: Result, reference: Result) -> Verdict:
    """Whether ``row`` drew what the reference did, or what its design explains."""
    why = not_comparable(row, reference)
    if why:
        return Verdict("not comparable", why)
    far = distance(row, reference).relative
    if not math.isfinite(far):
        return Verdict("DIFFERS", "samples that are no numbers")
    if row.parity != "exact":
        return Verdict("by design")
    if reference.parity != "exact":
        return Verdict("not comparable", "the reference is not exact itself")
    allowed = limit(reference)
    if far > allowed:
        return Verdict(
            "DIFFERS", f"samples {far:.1e} away, of {allowed:.1e} that rounding explains"
        )
    return Verdict("equal")

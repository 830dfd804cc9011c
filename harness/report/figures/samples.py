"""Samples of a row compared with its reference's: distances, the limit of equality, the verdict.

For sampling rows this replaces the parity of losses. Distances are over all values of the
stored latents: the relative L2 error, and the PSNR with the range of the reference's values.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.report.figures import derive
from harness.report.figures.parity import Verdict
from harness.result import Result

if TYPE_CHECKING:
    import numpy as np

ROUNDOFF = 2.0**-24
"""Unit roundoff of float32."""
SLACK = 4.0
LOOSEST = 1e-3
"""Upper bound of the limit. If a sampler amplifies rounding further, equality has no meaning.

Rows beyond the bound are shown as different.
"""
SAME = ("sampler_steps", "cfg_scale", "seed", "weights", "init", "model", "objective", "data")
"""Fields of a spec that decide the samples. Rows that differ in one are not compared."""


@dataclass(frozen=True)
class Distance:
    """The distance of samples from the reference's.

    ``relative``: L2 error of all stored latents. ``worst``: that of the worst sample.
    ``psnr_db``: in decibels, infinite if they are equal.
    """

    relative: float
    worst: float
    psnr_db: float


@dataclass(frozen=True)
class DrawnRow:
    """The samples of a row, compared with its reference's.

    ``latency_seconds``: median of a sample drawn alone. ``limit``: distance up to which samples
    count as equal. ``away``: the distance; None for the reference itself, or if the rows are not
    comparable. ``recognised``: share of digits that a classifier recognises as their labels.
    ``agreed``: share that it classifies as the reference's samples.
    """

    latency_seconds: float
    evaluations: int
    echo: float
    limit: float
    away: Distance | None
    recognised: float | None = None
    agreed: float | None = None


def drawn_row(results: Sequence[Result], reference: Result, *, is_reference: bool) -> DrawnRow:
    """Return the repetitions of one row compared; the largest distance counts."""
    first = results[0]
    seconds = [s for result in results for s in result.drawn.latency_seconds]
    alone = is_reference or not_comparable(first, reference)
    compared = [] if alone else [distance(r, reference) for r in results]
    return DrawnRow(
        latency_seconds=derive.quantile(seconds, 0.5),
        evaluations=first.drawn.evaluations,
        echo=first.drawn.echo,
        limit=limit(reference),
        away=max(compared, key=lambda far: far.relative, default=None),
        recognised=share_alike(first.drawn.taken_for, first.drawn.labels),
        agreed=share_alike(first.drawn.taken_for, reference.drawn.taken_for) if compared else None,
    )


def share_alike(ours: Sequence[int] | None, theirs: Sequence[int] | None) -> float | None:
    """Return the share of samples with the same class in both; None if one is unknown."""
    if not ours or not theirs or len(ours) != len(theirs):
        return None
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def latents(result: Result) -> np.ndarray:
    """Return the stored samples, float64 [B, C, H, W].

    Raises:
        ValueError: the text has another number of values than the shape.
    """
    import numpy as np

    raw = base64.b64decode(result.drawn.latents, validate=True)
    return np.frombuffer(raw, "<f4").astype(np.float64).reshape(result.drawn.shape)


def not_comparable(row: Result, reference: Result) -> str:
    """Return the difference that prevents a comparison of two rows' samples; empty if none."""
    if row.drawn is None or reference.drawn is None:
        return "one of them drew no samples"
    for name in SAME:
        ours, theirs = (_value(r, name) for r in (row, reference))
        if ours != theirs:
            return f"other {name}: {ours}, not {theirs}"
    weights = [r.configs.get("initial_weights") for r in (row, reference)]
    if weights[0] != weights[1]:
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
    """Return the distance of a row's samples from those of a comparable reference."""
    import numpy as np

    ours, theirs = latents(row), latents(reference)
    gap, axes = ours - theirs, tuple(range(1, theirs.ndim))
    each = np.sqrt((gap**2).sum(axis=axes)) / np.sqrt((theirs**2).sum(axis=axes))
    mean_square, span = float((gap**2).mean()), float(theirs.max() - theirs.min())
    psnr = math.inf if mean_square == 0 else 10 * math.log10(span**2 / mean_square)
    return Distance(float(np.linalg.norm(gap) / np.linalg.norm(theirs)), float(each.max()), psnr)


def limit(reference: Result) -> float:
    """Return the relative distance up to which samples of float32 are equal.

    Each product of each evaluation adds a rounding of at most ``ROUNDOFF``, and n roundings add
    up to their square root. The reference has measured the sampler's amplification of one
    rounding: its ``echo``, the effect of the last bit of the noise.
    """
    drawn = reference.drawn
    roundings = drawn.evaluations * drawn.products
    return min(LOOSEST, SLACK * max(drawn.echo, ROUNDOFF) * math.sqrt(roundings))


def against(row: Result, reference: Result) -> Verdict:
    """Judge if ``row`` drew the reference's samples, or differs by design."""
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
        explained = f"of {allowed:.1e} that rounding explains"
        return Verdict("DIFFERS", f"samples {far:.1e} away, {explained}")
    return Verdict("equal")

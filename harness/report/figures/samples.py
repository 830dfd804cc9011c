"""Samples of a row compared with its reference's: the distance, its limit, the verdict.

For sampling rows this replaces the parity of losses. The distance is the relative L2 error over all
values of the stored latents.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.report.figures.parity import Verdict
from harness.result import Result

if TYPE_CHECKING:
    import numpy as np

ROUNDOFF = 2.0**-24
"""Unit roundoff of float32."""
SLACK = 64.0
"""Allowed distance as a multiple of the roundings: a sampler amplifies each of them."""
LOOSEST = 1e-3
"""Upper bound of the limit; rows beyond it are shown as different."""
SAME = ("seed", "weights", "init", "model", "objective", "data")
"""Fields of a spec that decide the samples, beside those of the sampler. Rows that differ in one
are not compared."""


def furthest(results: Sequence[Result], reference: Result) -> float | None:
    """Return the largest distance of the repetitions of one row; None if not comparable."""
    if not_comparable(results[0], reference):
        return None
    return max(distance(result, reference) for result in results)


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
    ours, theirs = (
        {name: getattr(r.spec, name) for name in SAME}
        | {"sampler_steps": r.spec.drawn_steps, "cfg_scale": r.spec.scale}
        | {"first weights": r.configs.get("initial_weights")}
        for r in (row, reference)
    )
    for name in ours:
        if ours[name] != theirs[name]:
            return f"other {name}: {ours[name]}, not {theirs[name]}"
    for name in ("noise", "labels", "shape"):
        if getattr(row.drawn, name) != getattr(reference.drawn, name):
            return f"other {name} of the samples"
    return ""


def distance(row: Result, reference: Result) -> float:
    """Return the relative L2 error of a row's samples against a comparable reference's."""
    import numpy as np

    ours, theirs = latents(row), latents(reference)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def limit(reference: Result) -> float:
    """Return the relative distance up to which samples of float32 are equal.

    Each product of each evaluation adds a rounding of at most ``ROUNDOFF``, and n roundings add
    up to their square root.
    """
    roundings = reference.drawn.evaluations * reference.drawn.products
    return min(LOOSEST, SLACK * ROUNDOFF * math.sqrt(roundings))


def against(row: Result, reference: Result) -> Verdict:
    """Judge if ``row`` drew the reference's samples, or differs by design."""
    why = not_comparable(row, reference)
    if why:
        return Verdict("not comparable", why)
    far = distance(row, reference)
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

"""Parity of a row with its reference: distances, their limits, and the verdict.

There are five relative measures: the losses and the gradient norms of every step, and for each
block the optimizer's first moment, its update and its average (``harness.worker.projections``). The
block that is furthest away counts. One whose gradient is almost zero counts less (``SMALL``): it is
rounding, and Adam makes an update of the usual size from it. The limit follows from the type of
computation: exact, rounded to fewer bits, or changed by design.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from harness.report.figures import derive
from harness.result import Result, by_block
from strategies import parse
from strategies.base import BadInput

WRONG = ("DIFFERS",)
"""Words of a row that computed something else than it promised; no answer names it."""
PARITY_LIMIT = 1e-3
"""Relative distance of a step's loss and gradient norm up to which two rows are equal.

It applies without a tighter limit: a GPU may round the operands of a product to TF32 (2^-11,
about 5e-4), and its kernels add in any order.
"""
EARLY_STEPS = 16
"""Steps with the tight limits; later ones have PARITY_LIMIT, because rounding grows chaotically."""
SLACK = 8.0
"""Allowed distance of two recipes as a multiple of that of two runs of one recipe.

Two recipes add the same numbers in another order.
"""
SAME_INPUTS = 1e-6
"""Relative tolerance of inputs; the sums have nine digits."""


class Limits(NamedTuple):
    """Relative distance, by measure, up to which two rows are equal.

    The measures are in the order in which a fault would show.
    """

    loss: float
    norm: float
    moment: float
    update: float
    average: float


MEASURES = Limits._fields
OF_BLOCKS = MEASURES[2:]
SMALL = 1e-3
"""Share of the length of all moments below which a block counts less.

The distance in such a block is relative to a thousandth of all moments, so the limit of moments,
5e-5, is float32's rounding of the whole. Example: a layer whose gradient is rounding alone.
"""
FLOAT32 = Limits(1e-5, 2e-5, 5e-5, 5e-4, 1e-2)
"""Limits for float32 on CPUs in the first 16 steps; later ones have PARITY_LIMIT.

Equal rows lie within 3e-7, 4e-6, 3e-5, 5e-5 and 6e-4 (DiTs and public models, 8 to 12 steps).
Faults measured for comparison:

- gradients rounded to bfloat16: 1e-7, 3e-5, 9e-4, 4e-3
- a weight decay of 0.01 twice or not at all: 1e-6, 4e-6, 2e-5, 1e-3
- gradients doubled after their norm: 9e-6, 8e-5, 1, 4e-2
- an average that misses one of 8 steps: 3e-2

An average moves by a ten thousandth of an update, near a float32's last bit.
"""
WIDE = Limits(1e-3, 1e-3, 2e-2, 0.2, 0.2)
"""Limits without a better basis: on GPUs without a repetition of the reference, and late.

GPUs add in any order. The limits still detect an update applied twice or not at all.
"""


# ---- distances ----


def distances(row: Result, reference: Result) -> dict[str, float]:
    """Return measure -> the largest relative distance, without measures that either row lacks."""
    return {measure: max(gaps)[0] for measure, gaps in _gaps(row, reference).items()}


def _gaps(row: Result, reference: Result) -> dict[str, list[tuple[float, str]]]:
    """Return each measure that both rows have -> its distances: of a curve's steps, without a
    name, or (distance, name) of the blocks.

    A small block, by the reference's moments, counts by its share of ``SMALL``.
    """
    curves = {
        "loss": (row.losses, reference.losses),
        "norm": (row.grad_norms, reference.grad_norms),
    }
    found = {m: [(far, "") for far in derive.step_distances(*pair)] for m, pair in curves.items()}
    if (ours := row.projections) and (theirs := reference.projections):
        sizes = {name: math.hypot(*sums) for name, sums in by_block(theirs.moment).items()}
        least = SMALL * math.hypot(*sizes.values())
        counts = {name: size / least for name, size in sizes.items() if size < least}
        for measure in OF_BLOCKS:
            pair = by_block(getattr(ours, measure)), by_block(getattr(theirs, measure))
            found[measure] = _apart(*pair, counts) if all(pair) else []
    return {measure: gaps for measure, gaps in found.items() if gaps}


def _apart(
    ours: Mapping[str, Sequence[float]],
    theirs: Mapping[str, Sequence[float]],
    counts: Mapping[str, float],
) -> list[tuple[float, str]]:
    """Return (distance, name): of a few signed sums, relative to the reference's, times the
    name's weight. It is 1 for a name that only one of them has.
    """
    found = []
    for name in dict.fromkeys([*theirs, *ours]):
        far = 1.0
        if name in ours and name in theirs:
            gap, size = math.dist(ours[name], theirs[name]), math.hypot(*theirs[name])
            far = gap / max(size, derive.LEAST) if math.isfinite(gap) else math.inf
            far *= counts.get(name, 1.0)
        found.append((far, name))
    return found


# ---- limits ----


def limits(reference: Sequence[Result]) -> Limits:
    """Return the limits for a row, by the reference's precision and device, not by the row's own.

    The row promised the same, but may have computed in less. In float32 on a CPU the limits are
    FLOAT32. Elsewhere they are the distances between the repetitions of the reference times
    SLACK, from FLOAT32 to WIDE; without repetitions they are WIDE.
    """
    first, *again = reference
    late = min(len(result.losses) for result in reference) > EARLY_STEPS
    if first.meter == "resident" and derive.precision(first.evidence) == "float32":
        return Limits(*FLOAT32[:2], *WIDE[2:]) if late else FLOAT32
    if not again:
        return WIDE
    apart = [distances(r, first) for r in again]
    furthest = [SLACK * max(a.get(measure, 0.0) for a in apart) for measure in MEASURES]
    return Limits(*map(min, map(max, FLOAT32, furthest), WIDE))


def shares(row: Result, reference: Result, allowed: Limits) -> dict[str, float]:
    """Return measure -> distance as a share of its limit; above 1 the rows differ.

    Curves have the limit in the first ``EARLY_STEPS``, and PARITY_LIMIT in all steps.
    """
    found = {}
    for measure, gaps in _gaps(row, reference).items():
        limit, late = getattr(allowed, measure), max(gaps)[0]
        found[measure] = late / limit
        if measure not in OF_BLOCKS:
            early = max(gaps[:EARLY_STEPS])[0]
            found[measure] = max(early / limit, late / max(limit, PARITY_LIMIT))
    return found


# ---- verdicts ----


class Verdict(NamedTuple):
    """The parity of a row with its reference. ``what`` has the difference.

    ``word`` is one of:

    - "equal"
    - "equal losses": a row has no gradient norms (an engine may free gradients before they can
      be read)
    - "DIFFERS": it is further away than its type of computation explains
    - "by design": the row did not promise the exact computation
    - "not comparable": no common step, or the reference is not exact itself
    """

    word: str
    what: str = ""


SIXTEEN_BITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Unit roundoff of 16-bit types."""


def against_the_reference(row: Result, reference: Result, allowed: Limits) -> Verdict:
    """Judge if ``row`` computed what the reference did, within what its computation explains.

    Rounding to a type of unit roundoff u moves a loss by 4 u and a norm by 16 u at most. A row that
    promised the exact computation is held to all measures, another one to what its parts leave
    (``_as_left``).
    """
    exact = (row.parity == "exact", reference.parity == "exact")
    if not (row.losses and reference.losses) or exact == (True, False):
        return Verdict("not comparable")
    if other := other_work(row, reference):
        return Verdict("DIFFERS", other)
    if exact[0]:
        # A user's script sets its precision by itself, and engines round at different places.
        kinds = [derive.precision(r.evidence) or "" for r in (row, reference)]
        units = [SIXTEEN_BITS.get(kind, 0.0) for kind in kinds]
        what = _worst(row, reference, _rounded(allowed, max(units) if all(units) else 0.0))
        equal = "equal" if row.grad_norms and reference.grad_norms else "equal losses"
        return Verdict("DIFFERS", what) if what else Verdict(equal)
    try:
        parts = parse(row.spec.recipe).altering
    except BadInput:  # of another version
        return Verdict("by design")
    if not exact[1]:
        return Verdict("by design")
    altered = {word for part in parts for word in part.alters}
    unit = max((part.unit for part in parts), default=0.0)
    ours, theirs = _as_left(row, altered), _as_left(reference, altered)
    what = _worst(ours, theirs, _rounded(allowed, unit))
    if not what and altered == {"rounding"}:
        what = _moments_too_far(row, reference, max(allowed.moment, 8 * unit))
    explained = f"{what}; {'+'.join(map(str, parts))} explains less"
    return Verdict("DIFFERS", explained) if what else Verdict("by design")


def _rounded(allowed: Limits, unit: float) -> Limits:
    return Limits(max(allowed.loss, 4 * unit), max(allowed.norm, 16 * unit), *allowed[2:])


def _worst(row: Result, reference: Result, allowed: Limits) -> str:
    """Return the measure that is furthest beyond its limit, and its distance; empty if none is."""
    found = shares(row, reference, allowed)
    measure = max(found, key=found.__getitem__, default="")
    if found.get(measure, 0.0) <= 1.0:
        return ""
    far, name = max(_gaps(row, reference)[measure])
    return f"{measure}{f' of {name}' if name else ''} {far:.1e} away"


def _as_left(row: Result, altered: set[str]) -> Result:
    """Return the part of a row that its design leaves as it is.

    An altered forward pass leaves nothing. Rounding alone leaves the early steps. Another update
    leaves the first step, and its norm unless gradients are altered.
    """
    steps = EARLY_STEPS if altered <= {"rounding"} else 0 if "forward" in altered else 1
    norms = [] if "gradients" in altered else row.grad_norms[:steps]
    return dataclasses.replace(row, losses=row.losses[:steps], grad_norms=norms, projections=None)


def _moments_too_far(row: Result, other: Result, most: float) -> str:
    """Return the distance of the moments of all parameters together beyond ``most``.

    Empty if none, or late, when more than rounding may have moved them. Moments show a gradient
    that came too late, or a change after the norm; a norm shows neither. Rounding moves them by at
    most 2.5 u (LTX-Video, the largest of about ten models and batches).
    """
    pair = [by_block(r.projections.moment) if r.projections else {} for r in (row, other)]
    if max(len(row.losses), len(other.losses)) > EARLY_STEPS or not all(pair):
        return ""
    ours, theirs = pair
    gaps = [math.dist(ours.get(n, [0.0] * len(sums)), sums) for n, sums in theirs.items()]
    norm = math.hypot(*(x for sums in theirs.values() for x in sums))
    far = math.hypot(*gaps) / max(norm, derive.LEAST)
    return "" if far <= most else f"moments of all parameters together {far:.1e} away"


def unrepeatable(reference: Sequence[Result]) -> str:
    """Return why no row can be compared with this reference; empty if rows can.

    Two runs of it differ from each other beyond the limits: it does not fix its seed.
    """
    first, *again = reference
    far = max((distances(r, first).get("loss", 0.0) for r in again), default=0.0)
    if far <= limits(reference).loss:
        return ""
    return f"two runs of {first.spec.recipe} differ by {far:.1e}: the seed is not fixed"


def other_work(row: Result, reference: Result) -> str:
    """Return the difference in the start of two rows; empty if none is known."""
    weights = [r.configs.get("initial_weights") for r in (row, reference)]
    if all(weights) and weights[0] != weights[1]:
        return f"other first weights: {weights[0]}, not {weights[1]}"
    if row.projections and reference.projections:
        pair = row.projections.inputs, reference.projections.inputs
        other = [name for far, name in _apart(*pair, {}) if far > SAME_INPUTS]
        if all(pair) and other:
            return f"other inputs in the first step: {', '.join(other)}"
    return ""


def computation(row: Result) -> str:
    """Return which computation named "bf16" or "fp16" a row ran, by the types that it read back.

    Empty in float32 and if no types were read.
    """
    types = derive.types(row.evidence)
    kind, stored, master = (types.get(k) for k in ("compute_dtype", "parameters", "master"))
    if kind not in ("bfloat16", "float16") or not stored:
        return ""
    if stored == "float32":
        # The shards are the master weights and were never rounded, unlike those of an engine that
        # keeps both.
        facts = (facts for facts in row.evidence.values() if isinstance(facts, dict))
        gathered = next((found["gathered_as"] for found in facts if "gathered_as" in found), "")
        return "autocast" if gathered in ("", "float32") else "gathered in 16 bits"
    mastered = master == "float32" or row.spec.sampling  # sampling needs no master
    return "16-bit weights" + ("" if mastered else " without a master")

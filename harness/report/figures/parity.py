"""Whether a row computed what its reference did: distances of curves and of what the optimizer did,
the limits that they are held to, and the word for it.

Five measures, each a relative distance: the losses and the gradient norms of every step, and of
each parameter the optimizer's first moment, its update and its average
(``harness.worker.projections``), of which the parameter that is furthest away counts. One whose
gradient is next to nothing counts by that much less (``SMALL``): it is rounding, and Adam makes an
update of the usual size of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.report.figures import derive
from harness.result import Projections, Result
from strategies import parse
from strategies.base import BadInput
from strategies.recipe import Recipe

WRONG = ("DIFFERS", "beyond design")
"""Words of a row that computed something else than it promised: it is in no answer."""
MEASURES = ("loss", "norm", "moment", "update", "average")
"""In the order in which a fault would show."""
OF_PARAMETERS = MEASURES[2:]
EARLY_STEPS = 16
"""Rounding grows from step to step, as training is chaotic: later ones are held to PARITY_LIMIT."""
SLACK = 8.0
"""How many times further apart than two runs of one recipe two recipes may be: they add the same
numbers in other orders."""
SAME_INPUTS = 1e-6
"""Relative; the sums have nine digits."""


@dataclass(frozen=True)
class Limits:
    """Up to which relative distance two rows are equal, by measure; ``why`` in words."""

    loss: float
    norm: float
    moment: float
    update: float
    average: float
    why: str = ""


SMALL = 1e-3
"""Share of the length of all moments together. A parameter whose moment is smaller counts by as
much less: what is apart in it is then told as a share of a thousandth of all, so that the limit of
moments, 5e-5, is float32's rounding of the whole. The bias of keys has no gradient but rounding,
for a softmax forgives a constant; alone in a tensor it is away from itself by more than itself."""
FLOAT32 = Limits(
    1e-5, 2e-5, 5e-5, 5e-4, 1e-2, "float32 on CPUs, the first 16 steps; later losses and norms 1e-3"
)
"""Rows that compute alike lie within 3e-7, 4e-6, 3e-5, 5e-5 and 6e-4 (DiTs and public models, 8 to
12 steps). Next to them: gradients rounded to bfloat16 (1e-7, 3e-5, 9e-4, 4e-3), a weight decay of
0.01 twice or not at all (1e-6, 4e-6, 2e-5, 1e-3), gradients doubled behind their norm (9e-6, 8e-5,
1, 4e-2), an average that misses one of 8 steps (3e-2). An average moves by a ten thousandth of an
update, near a float32's last bit."""
WIDE = Limits(1e-3, 1e-3, 2e-2, 0.2, 0.2, "no tighter limit is known here")
"""Where nothing tells more: on GPUs, which add in any order, without a repetition of the reference;
and far into a training. The update is still told from twice it, and from none."""


def alarming(text: str) -> bool:
    """Whether a cell or a sentence says that a row computed something else than it promised."""
    return any(word in text for word in WRONG)


# ---- distances ----


def distances(row: Result, reference: Result) -> dict[str, float]:
    """Measure -> the largest relative distance; without those that either row lacks."""
    found = {
        "loss": derive.curve_distance(row.losses, reference.losses),
        "norm": derive.curve_distance(row.grad_norms, reference.grad_norms),
    }
    for kind, apart in _parameters(row.projections, reference.projections):
        found[kind] = max((d for d, _ in apart), default=None)
    return {kind: far for kind, far in found.items() if far is not None}


def _parameters(
    ours: Projections | None, theirs: Projections | None
) -> Iterator[tuple[str, list[tuple[float, str]]]]:
    """Each kind of sums that both rows have: (distance, name) of the parameters."""
    if ours is None or theirs is None:
        return
    counts = _counts(theirs.moment)
    for kind in OF_PARAMETERS:
        pair = getattr(ours, kind), getattr(theirs, kind)
        if all(pair):
            yield kind, _apart(*pair, counts)


def _counts(moments: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """How much each parameter counts, by the reference's moments; 1 unless it is small."""
    sizes = {name: math.hypot(*sums) for name, sums in moments.items()}
    least = SMALL * math.hypot(*sizes.values())
    return {name: size / least for name, size in sizes.items() if size < least}


def _apart(
    ours: Mapping[str, Sequence[float]],
    theirs: Mapping[str, Sequence[float]],
    counts: Mapping[str, float] | None = None,
) -> list[tuple[float, str]]:
    """(distance, name) of each: of a few signed sums, relative to the reference's, times what the
    name counts; 1 for a name that only one of them has."""
    names = dict.fromkeys([*theirs, *ours])
    known = counts or {}
    return [
        (_relative(ours[n], theirs[n]) * known.get(n, 1.0) if n in ours and n in theirs else 1.0, n)
        for n in names
    ]


def _relative(ours: Sequence[float], theirs: Sequence[float]) -> float:
    gap = math.dist(ours, theirs)
    return gap / max(math.hypot(*theirs), derive.LEAST) if math.isfinite(gap) else math.inf


def furthest(row: Result, reference: Result, measure: str) -> str:
    """The parameter that is furthest away in a measure of parameters; empty for another measure."""
    for kind, apart in _parameters(row.projections, reference.projections):
        if kind == measure:
            return max(apart)[1]
    return ""


# ---- limits ----


def limits(reference: Sequence[Result]) -> Limits:
    """What a row is held to: by what the first of these, the reference, computed in, and on what;
    not by what the other row did, which promised the same and may have computed in less.

    In float32 on a CPU: FLOAT32. Elsewhere from the repetitions of the reference, the others of
    these, if there are any: what one recipe is away from itself on this device, times SLACK.
    """
    first, *again = reference
    steps = min(len(first.losses), *(len(r.losses) for r in again)) if again else len(first.losses)
    late = steps > EARLY_STEPS
    if first.meter == "resident" and derive.precision(first.evidence) == "float32":
        far = {"moment": WIDE.moment, "update": WIDE.update, "average": WIDE.average}
        return dataclasses.replace(FLOAT32, **far) if late else FLOAT32
    if not again:
        return WIDE
    apart = [distances(r, first) for r in again]
    measured = {
        measure: min(
            max(getattr(FLOAT32, measure), SLACK * max(a.get(measure, 0.0) for a in apart)),
            getattr(WIDE, measure),
        )
        for measure in MEASURES
    }
    return Limits(**measured, why=f"{SLACK:g} times what {len(again) + 1} runs of it are apart")


def shares(row: Result, reference: Result, allowed: Limits) -> dict[str, float]:
    """Measure -> distance as a share of what is allowed: above 1 they differ. Curves are held to
    the limit in the first ``EARLY_STEPS``, and to PARITY_LIMIT in all."""
    pairs = {"loss": (row.losses, reference.losses), "norm": (row.grad_norms, reference.grad_norms)}
    found = distances(row, reference)
    for measure in found:
        limit = getattr(allowed, measure)
        if measure in pairs:
            found[measure] = _curve_share(*pairs[measure], limit)
        else:
            found[measure] /= limit
    return found


def _curve_share(ours: Sequence[float], theirs: Sequence[float], limit: float) -> float:
    early = derive.curve_distance(ours[:EARLY_STEPS], theirs[:EARLY_STEPS]) or 0.0
    whole = derive.curve_distance(ours, theirs) or 0.0
    return max(early / limit, whole / max(limit, derive.PARITY_LIMIT))


# ---- verdicts ----


@dataclass(frozen=True)
class Verdict:
    """``word``: "equal"; "equal losses" where a row has no gradient norms (an engine may free
    gradients before they can be read); "DIFFERS"; "by design" for a row that did not promise the
    exact computation; "beyond design" for one that is further away than what it alters explains;
    "not comparable" without a common step, or where the reference is not exact itself. ``what``
    says in what it differs."""

    word: str
    what: str = ""


def against_the_reference(row: Result, reference: Result, allowed: Limits) -> Verdict:
    """Whether ``row`` computed what the reference did, or what its design explains."""
    exact = (row.parity == "exact", reference.parity == "exact")
    if derive.curve_distance(row.losses, reference.losses) is None or exact == (True, False):
        return Verdict("not comparable")
    other = other_work(row, reference)
    if other:
        return Verdict("DIFFERS", other)
    if exact[0]:
        worst = _worst(row, reference, shares(row, reference, allowed))
        lacks_norms = not (row.grad_norms and reference.grad_norms)
        return worst or Verdict("equal losses" if lacks_norms else "equal")
    recipe = _recipe(row)
    beyond = _unexplained(row, reference, recipe, allowed) if recipe and exact[1] else ""
    return Verdict("beyond design", beyond) if beyond else Verdict("by design")


def other_work(row: Result, reference: Result) -> str:
    """In what two rows began differently; empty where they did not, as far as both say."""
    weights = [r.configs.get("initial_weights") for r in (row, reference)]
    if all(weights) and weights[0] != weights[1]:
        return f"other first weights: {weights[0]}, not {weights[1]}"
    if row.projections and reference.projections:
        pair = row.projections.inputs, reference.projections.inputs
        other = [name for far, name in _apart(*pair) if far > SAME_INPUTS]
        if all(pair) and other:
            return f"other inputs in the first step: {', '.join(other)}"
    return ""


def _worst(row: Result, reference: Result, found: Mapping[str, float]) -> Verdict | None:
    """DIFFERS by the measure that is furthest beyond its limit, if one is."""
    measure = max(found, key=found.__getitem__)
    if found[measure] <= 1.0:
        return None
    name = furthest(row, reference, measure)
    far = distances(row, reference)[measure]
    return Verdict("DIFFERS", f"{measure}{f' of {name}' if name else ''} {far:.1e} away")


def _unexplained(row: Result, reference: Result, recipe: Recipe, allowed: Limits) -> str:
    """What no part of a recipe explains; empty where all is explained, or nothing can be said:
    rounding to a type of unit roundoff u moves a loss and a norm by a few u, and the moments of all
    parameters together by at most 2.5 (LTX-Video, of some ten models and batches)."""
    if "forward" in _altered(recipe):
        return ""
    unit, altered = _unit(recipe), _altered(recipe)
    loss, norm = max(allowed.loss, 4 * unit), max(allowed.norm, 16 * unit)
    far = _too_far(row, reference, altered, loss, norm)
    if far:
        return f"{far}; {design(row)} explains {loss:.1e} and {norm:.1e}"
    moments = max(allowed.moment, 8 * unit)
    far = _moments_too_far(row, reference, altered, moments)
    return f"{far}; {design(row)} explains {moments:.1e}" if far else ""


def _too_far(row: Result, other: Result, altered: set[str], loss: float, norm: float) -> str:
    """In what two rows are further apart than loss and norm may be; empty where in nothing.

    Looks where a design leaves nothing else to explain it: before the first update at the first
    loss, and at the first norm unless gradients are altered; if it only rounds, at the early steps.
    """
    steps = EARLY_STEPS if altered <= {"rounding"} else 1
    curves = {"loss": (row.losses, other.losses, loss)}
    if "gradients" not in altered:
        curves["norm"] = (row.grad_norms, other.grad_norms, norm)
    for measure, (ours, theirs, most) in curves.items():
        far = derive.curve_distance(ours[:steps], theirs[:steps]) or 0.0
        if far > most:
            when = "the first step" if steps == 1 else "early steps"
            return f"{measure} of {when} {far:.1e} away"
    return ""


def _moments_too_far(row: Result, other: Result, altered: set[str], most: float) -> str:
    """That the moments of all parameters together, which is their gradients, are further apart than
    ``most``; empty where they are not, or where more than rounding may have moved them. A norm
    forgives a gradient that came too late, and knows nothing of what was done behind it."""
    early = max(len(row.losses), len(other.losses)) <= EARLY_STEPS
    pair = [r.projections.moment if r.projections else {} for r in (row, other)]
    if altered != {"rounding"} or not early or not all(pair):
        return ""
    ours, theirs = pair
    gaps = [math.dist(ours.get(n, [0.0] * len(sums)), sums) for n, sums in theirs.items()]
    whole = math.hypot(*(x for sums in theirs.values() for x in sums))
    far = math.hypot(*gaps) / max(whole, derive.LEAST)
    return "" if far <= most else f"moments of all parameters together {far:.1e} away"


# ---- siblings: rows that alter the same ----


def _recipe(row: Result) -> Recipe | None:
    """The recipe as this version has it; None where it has no such recipe."""
    try:
        return parse(row.spec.recipe)
    except BadInput:
        return None


def design(row: Result) -> str:
    """What a row alters by design, as a recipe spells it; empty for an exact row."""
    recipe = _recipe(row)
    parts = recipe.altering if recipe else ()
    return "+".join(map(str, parts)) if row.parity != "exact" else ""


def replaces_the_model(row: Result) -> bool:
    """Whether a row draws, by design, with another model than the one that its spec names."""
    recipe = _recipe(row)
    return recipe is not None and "model" in _altered(recipe)


def computation(row: Result) -> str:
    """Which of the computations that "bf16" or "fp16" name a row was, by what it read back; empty
    in float32 and where nothing was read."""
    types = derive.types(row.evidence)
    kind, kept, master = (types.get(k) for k in ("compute_dtype", "parameters", "master"))
    if kind not in ("bfloat16", "float16") or not kept:
        return ""
    if kept == "float32":
        # The shards are the master, and were never rounded, as an engine's that keeps both is.
        whole = derive.gathered_as(row.evidence) in ("", "float32")
        return "autocast" if whole else "gathered in 16 bits"
    mastered = master == "float32" or row.spec.sampling  # where nothing is trained none is wanted
    return "16-bit weights" + ("" if mastered else " without a master")


def against_sibling(row: Result, sibling: Result) -> str:
    """In what two rows that alter the same are apart, though nothing explains it; empty if in
    nothing. Of one computation they may differ by roundings that fall otherwise where sums are
    taken in another order, which leave up to an eighth of the unit roundoff in a mean loss and one
    in a norm (zero3_offload by zero2 in bf16: a fortieth and a quarter), and four in the moments of
    all parameters together (there: six tenths); where nothing is rounded the first step is held as
    an exact row's is. Rows of another computation are not held to each other:
    how far they are apart is shown."""
    recipe = _recipe(row)
    if recipe is None or computation(row) != computation(sibling):
        return ""
    unit, altered = _unit(recipe), _altered(recipe)
    allowed = WIDE if sibling.meter == "cuda" else FLOAT32
    loss, norm = max(allowed.loss, unit / 8), max(allowed.norm, unit)
    far = other_work(row, sibling) or _too_far(row, sibling, altered, loss, norm)
    return far or _moments_too_far(row, sibling, altered, max(allowed.moment, 4 * unit))


def _altered(recipe: Recipe) -> set[str]:
    return {word for part in recipe.altering for word in part.alters}


def _unit(recipe: Recipe) -> float:
    """The coarsest unit roundoff of its parts; 0 where none rounds."""
    return max((part.unit for part in recipe.altering), default=0.0)

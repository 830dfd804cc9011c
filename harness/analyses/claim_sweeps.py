"""Claims about memory by batch, each judged over a sweep of global batches.

A verdict has the first batch that crosses a threshold, and the saving in the limit of large
batches. A printed number has as many digits as keep it on its side of the threshold: a saving of
0.497 that misses a half is never shown as 50 %.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from harness.analyses import fits
from harness.analyses.fits import Band, Pair, Span
from harness.report.data.lookup import Absent, Missing, Rows, beyond_state, state_share, step_bytes
from harness.report.figures.units import gib

FRACTION, HALF, MUCH, SOME, NOTHING = 0.5, 0.45, 0.25, 0.05, 0.02
"""Shares of the peak from which a saving leaves only a fraction, halves, is much (or medium), or
exists.

``NOTHING`` is the share from which a cost exists. Each word ends at the next threshold.
"""
MOST_PLACES = 6


class Verdict(StrEnum):
    """The verdict on a claim, for the model and machine of the rows."""

    HOLDS = "holds here"
    ONLY = "holds here only"
    NOT = "does not hold here"
    NEAR = "cannot be told here:"
    OPEN = "not measured"


@dataclass(frozen=True)
class Judgement:
    """A verdict, its condition or the reason that it is undecided, and the numbers in words."""

    verdict: Verdict
    numbers: str
    condition: str = ""


Rule = Callable[[Rows], Judgement]
"""Judges a claim by rows, measured or predicted."""


def applied(rule: Rule, rows: Rows) -> Judgement:
    """Return a rule's judgement of these rows; open, with the reason, if a row is missing."""
    try:
        return rule(rows)
    except Missing as missing:
        return Judgement(Verdict.OPEN, str(missing))


def places(value: float, limits: Sequence[float], least: int = 0) -> int:
    """Return the decimals, at least ``least``, that keep ``value`` on its side of every limit."""

    def sides(shown: float) -> list[tuple[bool, bool]]:
        return [(shown > limit, shown < limit) for limit in limits]

    tried = range(least, MOST_PLACES)
    return next((p for p in tried if sides(round(value, p)) == sides(value)), MOST_PLACES)


def number(value: float, *limits: float) -> str:
    """Return a plain number with two decimals, or more if its limits need them."""
    return f"{value:.{places(value, limits, 2)}f}"


def change(fraction: float, *limits: float) -> str:
    """Return a change of a peak as text; ``limits`` are changes too (a saving is negative)."""
    if abs(fraction) < 0.005:
        return "unchanged"
    return f"{100 * fraction:+.{places(100 * fraction, [100 * x for x in limits])}f}%"


def share(fraction: float, *limits: float) -> str:
    """Return a part of a whole as text."""
    return f"{100 * fraction:.{places(100 * fraction, [100 * x for x in limits])}f}%"


def spread_words(spread: float | None) -> str:
    """Return the spread of a value, to follow it."""
    if spread is None:
        return "(of two points)"
    return "+- <0.001" if spread < 0.001 else f"+- {spread:.2g}"


def points(spread: float | None) -> str:
    """Return the distance of two estimates of a share, in percentage points."""
    return "of two points" if spread is None else f"+-{100 * spread:.1f}"


BATCHES = (1, 2, 4, 8, 16, 32)
"""Global batches of a sweep.

At the first, weights, gradients and optimizer state should be most of plain training's peak; at
the last, activations. The rows show if they are.
"""
SMALL, LARGE = BATCHES[0], BATCHES[-1]
TRAINED_BATCHES = (*BATCHES, 64, 96)
"""The same on a GPU for DiT-XL/2.

The last is the largest multiple of 32 at which plain float32 training fits in 80 GiB.
"""
PLAIN = "single"
KINDS_OF_GRADIENTS = ("compress:kind=fp16", "compress:kind=powersgd", "topk")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A recipe and its base at each batch at which both were measured.

    ``peaks`` are of a step. ``beyond`` is the most memory beyond the state; its slopes give the
    limit for large batches, because a peak's slope may still be the state's. ``shares``: batch
    -> activations and temporaries as a share of the base's peak. ``missing``: batch -> the
    reason without a pair.
    """

    peaks: Sequence[Pair]
    beyond: Sequence[Pair] = ()
    shares: Mapping[float, float] = field(default_factory=dict)
    missing: Mapping[int, str] = field(default_factory=dict)


def batches(rows: Rows) -> tuple[int, ...]:
    """Return the batches of these rows' sweep."""
    return TRAINED_BATCHES if rows.device == "cuda" else BATCHES


def swept(rows: Rows, recipe: str, base: str = PLAIN, at: tuple[int, ...] | None = None) -> Sweep:
    """Return ``recipe`` with ``base`` over all batches (or ``at``) at which both were traced.

    Raises:
        Missing: there is no such batch; has the reason at the largest.
    """
    peaks, beyond, shares, missing, last = [], [], {}, {}, Missing()
    wanted = at or batches(rows)
    for batch in wanted:
        try:
            ours, theirs = (rows.get(r, global_batch=batch) for r in (recipe, base))
            sizes = step_bytes(ours), step_bytes(theirs)
            mores = beyond_state(ours), beyond_state(theirs)
        except Missing as why:
            last = why
            if not isinstance(why, Absent):
                missing[batch] = str(why)
            continue
        peaks.append(Pair(at=batch, ours=sizes[0], base=sizes[1]))
        beyond.append(Pair(at=batch, ours=mores[0], base=mores[1]))
        shares[batch] = 1 - state_share(theirs)
    if not peaks:
        raise last
    return Sweep(peaks=peaks, beyond=beyond, shares=shares, missing=missing)


def halved(sweep: Sweep) -> Sweep:
    """Return each batch of a sweep's base with half of it, if both were measured."""

    def pairs(of: Sequence[Pair]) -> list[Pair]:
        sizes = {pair.at: pair.base for pair in of}
        return [Pair(at=b, base=sizes[b], ours=sizes[b / 2]) for b in sizes if b / 2 in sizes]

    return Sweep(peaks=pairs(sweep.peaks), beyond=pairs(sweep.beyond), shares=sweep.shares)


def judged(sweep: Sweep, band: Band, numbers: str) -> Judgement:
    """Judge at which batches of the sweep the saving is in ``band``."""
    held = fits.spans(sweep.peaks, band)
    if not held:
        more = all(pair.saved > band.most for pair in sweep.peaks)
        return Judgement(Verdict.NOT, numbers, "as it saves more" if more else "")
    if len(held) == 1 and held[0].started is None and held[0].ended is None:
        first, last = sweep.peaks[0].at, sweep.peaks[-1].at
        one = f"at batch {first}, the one measured"
        every = f"at every batch from {first} to {last}"
        return Judgement(Verdict.HOLDS, numbers, one if first == last else every)
    where = " and ".join(_words(span, sweep) for span in held).rstrip(",")
    return Judgement(Verdict.ONLY, numbers, where)


def _words(span: Span, sweep: Sweep) -> str:
    """Return the start and end of a span, with the share of activations there."""
    texts = []
    if span.started:
        texts.append(f"from batch {span.start:.3g}{_around(span.started, sweep)}")
    if span.ended:
        texts.append(f"up to batch {span.end:.3g}{_around(span.ended, sweep)}")
    return " ".join([*texts, "on"] if not span.ended else texts)


def _around(edge: tuple[float, float], sweep: Sweep) -> str:
    """Return the measured neighbours of an edge, with the share of activations at both."""
    ends = [f"{at} ({share(sweep.shares[at], 0.5)} activations)" for at in dict.fromkeys(edge)]
    return f", between {' and '.join(ends)}," if len(ends) > 1 else f", {ends[0]},"


def by_batch(rows: Rows, recipe: str, band: Band, base: str = PLAIN) -> Judgement:
    """Judge over which batches ``recipe``'s saving of ``base``'s peak is in ``band``."""
    sweep = swept(rows, recipe, base)
    last = sweep.peaks[-1].at
    pace = rows.times(recipe, base, global_batch=last)
    return judged(sweep, band, f"{told(sweep, band)}; speed {pace} at batch {last}")


def told(sweep: Sweep, band: Band) -> str:
    """Return the savings at both ends of a sweep and in the limit of large batches."""
    edges = [-level for level in (band.least, band.most)]
    ends = dict.fromkeys((sweep.peaks[0], sweep.peaks[-1]))
    parts = [f"peak {', '.join(f'{change(-p.saved, *edges)} at batch {p.at}' for p in ends)}"]
    parts += [_limit(sweep, band, edges)] if len(sweep.peaks) > 1 else []
    parts += [f"batch {batch} is missing: {why}" for batch, why in sweep.missing.items()]
    return "; ".join(parts)


def _limit(sweep: Sweep, band: Band, edges: Sequence[float]) -> str:
    found = fits.limit(sweep.beyond)
    if found is None:
        return "no limit for large batches: the peak does not grow with them"
    last = sweep.peaks[-1]
    at_last = band.holds(last)
    in_limit = band.holds(Pair(at=last.at, base=1.0, ours=1.0 - found.value))
    turns = {(False, True): "begins", (True, False): "ends"}.get((at_last, in_limit))
    text = f"limit for large batches {change(-found.value, *edges)} ({points(found.spread)})"
    return f"{text}: it {turns} beyond batch {last.at}" if turns else text


def pure_bf16(rows: Rows) -> Judgement:
    """Judge with and without the float32 average of weights, whose size no precision changes."""
    band = Band(least=HALF)
    kept = by_batch(rows, "single+bf16_pure", band)
    bare = by_batch(rows, "single+bf16_pure+ema:place=none", band, "single+ema:place=none")
    last = batches(rows)[-1]
    average = rows.get("single+bf16_pure", global_batch=last).numbers.ema_bytes
    numbers = (
        f"{kept.numbers}; {gib(average)} of either peak are the float32 average of the weights: "
        f"without one {bare.numbers}"
    )
    if kept.verdict is Verdict.HOLDS or bare.verdict is Verdict.NOT:
        return Judgement(kept.verdict, numbers, kept.condition)
    without = f"where no float32 average of the weights is kept, {bare.condition}"
    either = f"{kept.condition}, or, {without}" if kept.condition else without
    return Judgement(Verdict.ONLY, numbers, either)


def accumulation(rows: Rows) -> Judgement:
    """Judge a little to medium saving: a half or more would be much."""
    band = Band(least=SOME, most=HALF, open_above=True)
    return by_batch(rows, "single+accumulate:steps=4", band)


def smaller_batch(rows: Rows) -> Judgement:
    """Judge if half of a batch saves part of the whole batch's peak."""
    sweep, band = halved(swept(rows, PLAIN)), Band(least=SOME)
    if not sweep.peaks:
        raise Missing(f"{PLAIN} was not measured at a batch and at half of it")
    first, last = sweep.peaks[0], sweep.peaks[-1]
    numbers = f"half of a batch: {told(sweep, band)}, from {gib(last.base)} to {gib(last.ours)}"
    pace = rows.rate_ratio(*(rows.get(PLAIN, global_batch=at) for at in (first.at / 2, last.at)))
    return judged(sweep, band, f"{numbers}; samples/s {pace} at batch {first.at / 2:g}")


def activations_fill(rows: Rows) -> Judgement:
    sweep = swept(rows, PLAIN)
    shares = sweep.shares
    state = [Pair(at=p.at, base=p.base, ours=p.base * (1 - shares[p.at])) for p in sweep.peaks]
    parts = ", ".join(f"{share(part, 0.5)} at {batch}" for batch, part in shares.items())
    numbers = f"activations and temporaries as a share of the peak, by batch: {parts}"
    return judged(Sweep(peaks=state, shares=shares), Band(least=0.5), numbers)


def pruning(rows: Rows, band: Band) -> Judgement:
    recipes = {"masks": "single+prune", "parts removed": "single+prune_structured"}
    kinds = {kind: swept(rows, recipe) for kind, recipe in recipes.items()}
    return kinds_judged(kinds, band, "with {}")


def graph_kept(rows: Rows) -> Judgement:
    words = ("retain_graph", "autograd_grad")
    kinds = {word: swept(rows, f"single+backward:call={word}") for word in words}
    return kinds_judged(kinds, Band(most=-NOTHING), "of {}")


def compression(rows: Rows) -> Judgement:
    kinds, wires = {}, []
    for part in KINDS_OF_GRADIENTS:
        kinds[part] = swept(rows, f"ddp+{part}", "ddp")
        row = rows.get(f"ddp+{part}", global_batch=kinds[part].peaks[-1].at)
        facts = row.first.evidence[part.partition(":")[0]]
        wires.append(f"{part} x{facts['wire_bytes'] / facts['dense_bytes']:.3g}")
    found = kinds_judged(kinds, Band(least=SOME), "of {}")
    numbers = f"{found.numbers}. On the wire: {', '.join(wires)}"
    return Judgement(found.verdict, numbers, found.condition)


def kinds_judged(kinds: Mapping[str, Sweep], band: Band, condition: str) -> Judgement:
    """Judge several kinds: all in ``band`` at every batch, none at any, or some, by name."""
    found = {kind: judged(sweep, band, told(sweep, band)) for kind, sweep in kinds.items()}
    numbers = ". ".join(f"{kind}: {judgement.numbers}" for kind, judgement in found.items())
    verdicts = {judgement.verdict for judgement in found.values()}
    held = {k: j.condition for k, j in found.items() if j.verdict is not Verdict.NOT}
    if verdicts == {Verdict.HOLDS}:
        return Judgement(Verdict.HOLDS, numbers, next(iter(held.values())))
    if not held:
        return Judgement(Verdict.NOT, numbers)
    texts = [f"{condition.format(kind)} {where}" for kind, where in held.items()]
    return Judgement(Verdict.ONLY, numbers, " and ".join(texts))

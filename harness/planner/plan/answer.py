"""The answer of a plan in words: the recipe to take, the nearest one, and the alternatives tried.

Also the one-line answer of ``plan --check``.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.memory.record import Instant
from harness.planner import verdict
from harness.planner.before_step import Before
from harness.planner.eager import note_of
from harness.planner.edits import Ways
from harness.planner.explore import Proof
from harness.planner.phase_needs import STEP
from harness.planner.plan.lattice import adapts
from harness.planner.plan.request import export_command
from harness.planner.verdict import Fit
from harness.report.figures.units import GIB

SMALL = GIB // 20
"""Bytes below which a category is not named: they round to 0.0 GiB."""
SAME = 0.005
"""Relative difference of two speeds below which neither recipe is called faster."""
MOST_NAMES = 4
"""Most settings that a verdict names as not counted."""
MUCH = 16 * GIB
"""Host memory of a node, in bytes, from which the answer states it."""


def answers(fits: Sequence[Fit], ways: Ways | None = None) -> list[str]:
    """Return the answer; if both adapters and full training were planned, an answer for each."""
    adapted = [fit for fit in fits if adapts(fit.resolved)]
    whole = [fit for fit in fits if fit not in adapted]
    if ways is not None or not adapted or not whole:
        return answer(fits, ways)
    kinds = {"Adapters, most weights frozen": adapted, "All weights": whole}
    return [line for head, some in kinds.items() for line in (f"{head}:", *answer(some))]


def answered(fits: Sequence[Fit], proofs: Sequence[Proof], ways: Ways | None) -> list[str]:
    """Return the answers of searches, or of a list of recipes if there are no ``proofs``."""
    if not proofs:
        return answers(fits, ways)
    lines = [line for proof in proofs for line in searched(proof, fits)]
    return [*lines, *tried_instead(ways)]


def answer(fits: Sequence[Fit], ways: Ways | None = None) -> list[str]:
    """Return the fastest recipe that fits; if none does, the nearest and the alternatives."""
    best = verdict.fastest(fits)
    if best is None:
        return _none_fits(fits) + tried_instead(ways)
    head = "Fastest predicted to fit" if best.fits else "None is sure to fit. Fastest that may"
    lines = [f"{head}: {best.label}, {rate_in_words(best)}, {reach(best)}{_on_host(best)}"]
    lines += [f"  {note}" for note in [note_of(best.resolved)] if note]
    lines += [*_step(best), *_export(best)]
    lines += _faster_if_it_fits(best, fits) if best.fits else tried_instead(ways)
    lines += _even_in_time(best, fits)
    least = verdict.nearest(fits)
    if least is not None and least is not best:
        lines.append(f"Least memory: {least.label}, {_need(least)}{_on_host(least)}")
    return lines


def searched(proof: Proof, fits: Sequence[Fit]) -> list[str]:
    """Return the answer of a search, its export command, and how many recipes were compared.

    ``fits``: all predictions of the plan.
    """
    kind, best = "Adapters" if proof.adapters else "All weights", proof.best
    if best is None:
        return _without_answer(kind, proof)
    sure = "" if best.fits else ", may fit"
    numbers = f"  {rate_in_words(best)}, needs {reach(best)}{sure}{_on_host(best)}"
    told = "" if proof.sure else ", none sure to fit"
    lines = [f"{kind}: {best.label}", numbers, *_step(best), *_export(best)]
    heads: dict[str, list[str]] = {}
    for head, fit in proof.others.items():
        heads.setdefault(f"{fit.label}, {rate_in_words(fit)}, {_need(fit)}", []).append(head)
    lines += [f"  {' and '.join(names)}: {words}" for words, names in heads.items()]
    alike = [fit for fit in fits if adapts(fit.resolved) == proof.adapters]
    lines += [*_faster_if_it_fits(best, alike), *_even_in_time(best, alike)]
    return [*lines, f"  of {proof.recipes} recipes{told}: {counts_in_words(proof)}"]


def _even_in_time(best: Fit, fits: Sequence[Fit]) -> list[str]:
    """Return how many rows that fit have times which cannot be told apart from the answer's, and
    the fastest of them."""
    rivals = [fit for fit in fits if fit.fits and fit is not best and fit.seconds]
    close = [fit for fit in rivals if _may_be_faster(fit, best) and _may_be_faster(best, fit)]
    close.sort(key=lambda fit: fit.seconds.total)
    if not close:
        return []
    others = f", and those of {len(close) - 1} more" * (len(close) > 1)
    return [f"  its time cannot be told apart from that of {close[0].label}{others}"]


def _without_answer(kind: str, proof: Proof) -> list[str]:
    """Return that no recipe fits, with the nearest; or that none could be predicted."""
    close = proof.nearest
    if close is None:
        return [f"{kind}: none of {proof.recipes} recipes is predicted: {counts_in_words(proof)}"]
    return [
        f"{kind}: none of {proof.recipes} recipes fits: {counts_in_words(proof)}",
        f"  nearest of those predicted: {close.label} {lacks(close)}",
        *_peak(close),
    ]


def counts_in_words(proof: Proof) -> str:
    """Return how many recipes of a search were predicted, and why others were not."""
    left = proof.recipes - proof.predicted - proof.failed - proof.unable
    others = "not recorded (--fresh)" if proof.recorded else "not better by estimate"
    counts = {
        "predicted": proof.predicted,
        "not tried" if proof.failed and not proof.predicted else others: left,
        "not for this card": proof.unable,
        "not predictable": proof.failed,
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _step(fit: Fit) -> list[str]:
    """Return the seconds of a step as its range, which a loader or an older library lengthens."""
    if not fit.seconds:
        return []
    low, high = (f"{s:.2g}" if s < 100 else f"{s:.0f}" for s in (fit.seconds.low, fit.seconds.high))
    return [f"  a step: at least {low} s, usually up to {high} s"]


def _export(fit: Fit) -> list[str]:
    command = export_command(fit)
    return [f"  export it: {command}"] if command else []


def reach(fit: Fit) -> str:
    """Return the need with its range and the card's memory: ``20.1 (17.0 to 23.2) of 24.0 GiB``."""
    between = f"({gib(fit.low_bytes)} to {gib(fit.most_bytes)})"
    return f"{bound(fit)}{gib(fit.need_bytes)} {between} of {gib(fit.gpu.memory_bytes)} GiB"


def bound(fit: Fit) -> str:
    """Return "at least ", "at most " or "about " for a need that leaves settings out; else
    nothing."""
    errs = {one.errs for one in fit.uncounted} - {"none"}
    words = {frozenset(): "", frozenset({"more"}): "at least ", frozenset({"less"}): "at most "}
    return words.get(frozenset(errs), "about ")


def of_uncounted(fit: Fit) -> str:
    """Return the settings that a prediction leaves out, after a colon; empty if there are none."""
    names = list(dict.fromkeys(one.what for one in fit.uncounted))
    more = f" and {len(names) - MOST_NAMES} more" * (len(names) > MOST_NAMES)
    verb = "is" if len(names) == 1 else "are"
    return f": {', '.join(names[:MOST_NAMES])}{more} {verb} not counted" if names else ""


def phases(fit: Fit) -> list[str]:
    """Return each phase's need and the reason for the largest; nothing if only the step counts."""
    if len(fit.phases) < 2:
        return []
    each = ", ".join(f"{name} {gib(one.gpu)}" for name, one in fit.phases.items())
    return [f"by phase: {each} GiB; {fit.binds} binds: {fit.phases[fit.binds].what}"]


def _peak(fit: Fit) -> list[str]:
    """Name the phase that needs more than the step, if any, then describe the step's peak."""
    lines = [f"  its peak: {peak_in_words(fit)}"]
    if fit.binds == STEP:
        return lines
    more = fit.phases[fit.binds]
    return [f"  needs the most in the phase {fit.binds}: {more.what}, {gib(more.gpu)} GiB", *lines]


def lacks(fit: Fit) -> str:
    """Return the missing memory of a recipe that does not fit: the GPU's or the host's."""
    if fit.verdict == "host":
        have, told = gib(fit.host_memory), fit.gpu.host_told or "assumed"
        return f"needs {gib(fit.host_bytes)} GiB of host memory, of {have} ({told})"
    return f"needs {_need(fit)}, {gib(-fit.margin_bytes)} GiB more than a GPU has"


def _faster_if_it_fits(best: Fit, fits: Sequence[Fit]) -> list[str]:
    """Return the fastest tight recipe if it is faster than the fastest that fits."""
    quick = verdict.fastest([fit for fit in fits if fit.verdict == "tight"])
    if quick is None or quick.samples_per_second <= (1 + SAME) * best.samples_per_second:
        return []
    return [f"  faster, and may fit: {quick.label}, {rate_in_words(quick)}, {reach(quick)}"]


def _on_host(fit: Fit) -> str:
    """Return the host memory that a recipe needs, if it is ``MUCH`` or more."""
    if not fit.host_bytes or fit.host_bytes < MUCH or fit.gpu.shared:
        return ""
    return f", and {gib(fit.host_bytes)} of {gib(fit.host_memory)} GiB of host memory"


def _may_be_faster(rival: Fit, best: Fit) -> bool:
    """Return True if ``rival`` is faster with half of each spread in its favour."""
    slow = best.seconds.total + best.seconds.spread / 2
    quick = rival.seconds.total - rival.seconds.spread / 2
    per_best = slow / best.resolved.spec.global_batch
    return quick / rival.resolved.spec.global_batch < per_best


def peak_in_words(fit: Fit) -> str:
    """Return the phase of a row's peak, and its three largest categories."""
    instant = fit.prediction.peak
    if instant is None:
        return "not traced"
    parts = [f"{gib(size)} GiB {name}" for name, size in largest(instant, 3)]
    return f"in {instant.phase}: {', '.join(parts) or 'nothing that is large'}"


def largest(instant: Instant, count: int) -> list[tuple[str, int]]:
    """Return up to ``count`` categories with the most bytes at an instant, as (words, bytes)."""
    ordered = sorted(instant.categories.items(), key=lambda item: -item[1])[:count]
    return [(name.replace("_", " "), size) for name, size in ordered if size >= SMALL]


def where(instant: Instant) -> str:
    """Return the phase, op and source line of a peak."""
    return f"in {instant.phase} at {', '.join(filter(None, (instant.op, instant.site)))}"


def _none_fits(fits: Sequence[Fit]) -> list[str]:
    close = verdict.nearest(fits)
    if all(fit.lack for fit in fits):
        return ["None of these can run on this card; the lines below the table say what can."]
    if close is None:
        return ["Nothing could be predicted; the lines below the table say why."]
    return [f"None is predicted to fit. Nearest: {close.label} {lacks(close)}", *_peak(close)]


def _need(fit: Fit) -> str:
    return f"{gib(fit.need_bytes)} GiB"


def tried_instead(ways: Ways | None) -> list[str]:
    """Return the alternatives that fit, or that none does, and the GPUs needed."""
    if ways is None:
        return []
    if ways.able:
        lines = [f"  {_offer(fit)}" for fit in ways.able]
        return [
            f"Predicted to fit instead, of {len(ways.tried)} tried, fastest first:",
            *lines,
            *_export(ways.able[0]),
        ]
    least = verdict.nearest(ways.tried)
    none_fits = (
        f"None of {len(ways.tried)} changes tried fits: {', '.join(f.label for f in ways.tried)}"
    )
    lines = [none_fits] if ways.tried else []
    if least:
        lines.append(f"The least of these: {least.label}, {_need(least)}")
    return lines + _on_more_gpus(ways.wider)


def _offer(fit: Fit) -> str:
    speed = f", {rate_in_words(fit)}" if fit.seconds else ""
    tight = " (tight)" if fit.verdict == "tight" else ""
    return f"{fit.label}: {_need(fit)}{speed}{tight}"


def _on_more_gpus(wider: Sequence[Fit]) -> list[str]:
    """Return the smallest number of GPUs tried on which the recipe fits."""
    if not wider:
        return []
    first = next((fit for fit in wider if fit.fits), None)
    if first is None:
        tried = ", ".join(str(fit.resolved.spec.processes) for fit in wider)
        return [f"Nor does {wider[0].label} on {tried} GPUs"]
    spec = first.resolved.spec
    return [f"On {spec.processes} GPUs, global batch {spec.global_batch}: {_offer(first)}"]


# ---- numbers ----


def rate(fit: Fit, gpus: int = 1) -> str:
    """Return, as text, images per second of the whole job, or of each of ``gpus``; of videos the
    seconds that one takes, or the seconds of GPUs."""
    speed = fit.samples_per_second / gpus
    number = speed if kind_of_sample(fit) == "image" else 1 / speed
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def rate_in_words(fit: Fit) -> str:
    """Return the rate with its unit, images a second or seconds a video."""
    unit = "images/s" if kind_of_sample(fit) == "image" else "s a video"
    return f"{rate(fit)} {unit}"


def kind_of_sample(fit: Fit) -> str:
    """Return "video" or "image"."""
    return "video" if fit.resolved.subject.samples_up("frames") else "image"


def near(size: int | None, spread: int | None) -> str:
    """Return bytes as GiB with their spread, for a table: 20.1 and its 3.6."""
    return "-" if size is None else f"{gib(size)} \u00b1{gib(spread)}"


def gib(size: int | None) -> str:
    """Return bytes as GiB, for a table."""
    return "-" if size is None else f"{size / GIB:.1f}"


# ---- check ----
# ``plan --check`` guards a training by one line and an exit code. 0: predicted to fit, by the upper
# end of the range. 1: does not fit, may fit, cannot run, or was not predicted. 2: bad input.


def check_line(fit: Fit, ways: Ways | None, before: Before | None = None) -> str:
    """Return the verdict with its reason and margin, and the nearest alternative that fits."""
    if fit.lack:
        return f"cannot run: {fit.label}: {fit.lack}"
    if fit.need_bytes is None:
        return f"not predicted: {fit.label}: {fit.prediction.reason}"
    note = note_of(fit.resolved)
    if fit.fits and before and not before.fits:
        return f"does not fit before its step, which needs {reach(fit)}: {before.short}"
    if fit.fits:
        free = f"{gib(fit.margin_bytes)} GiB free"
        told = [f"fits: {_size(fit)}, {free}{_host(fit)}", note, *phases(fit)]
        return "; ".join(filter(None, told))
    if fit.may_fit:
        word = "may fit" if fit.uncounted else "tight"
        said = f"{word}: {_size(fit)}, may or may not fit{_host(fit)}{_why(fit)}"
        return "; ".join(filter(None, [said, note, _way(ways)]))
    if fit.verdict == "host":
        return f"does not fit: {_size(fit)}, and {lacks(fit)}; {_way(ways)}"
    short = gib(-fit.margin_bytes)
    return f"does not fit: {_size(fit)}, {short} GiB more than it has{_why(fit)}; {_way(ways)}"


def _size(fit: Fit) -> str:
    spec, card = fit.resolved.spec, fit.gpu
    return (
        f"{spec.model} with {fit.label}, global batch {spec.global_batch}, needs "
        f"{reach(fit)} ({spec.processes} x {card.name}){of_uncounted(fit)}"
    )


def _host(fit: Fit) -> str:
    """Return the host memory that the verdict used."""
    if not fit.host_bytes or fit.gpu.shared:
        return ""
    told = fit.gpu.host_told or "assumed"
    return f", {gib(fit.host_bytes)} of {gib(fit.host_memory)} GiB of host memory ({told})"


def _why(fit: Fit) -> str:
    """Return the two largest categories at the peak; with several phases, the need of each."""
    instant = fit.prediction.peak
    if told := phases(fit):
        return f" ({told[0]})"
    if instant is None:
        return ""
    parts = [f"{gib(size)} {name}" for name, size in largest(instant, 2)]
    return f" (at its peak in {instant.phase} {', '.join(parts)})"


def _way(ways: Ways | None) -> str:
    """Return the nearest alternative that fits, also on more GPUs; else the smallest need."""
    able = ways.able if ways else []
    if able:
        return f"fits: {_offer_of_check(able[0])}"
    wider = next((fit for fit in ways.wider if fit.fits), None) if ways else None
    if wider:
        spec = wider.resolved.spec
        batch = f"global batch {spec.global_batch}"
        return f"on {spec.processes} GPUs, {batch}, fits: {_offer_of_check(wider)}"
    least = verdict.nearest(ways.tried) if ways else None
    if least is None:
        return "no alternative was found"
    return (
        f"no alternative that was tried fits; the smallest is {least.label} with "
        f"{gib(least.need_bytes)} GiB"
    )


def _offer_of_check(fit: Fit) -> str:
    speed = f", {rate_in_words(fit)}" if fit.seconds else ""
    speed += f" (speed assumed: {fit.gpu.like})" if speed and fit.gpu.like else ""
    return f"{fit.label}, {gib(fit.need_bytes)} GiB{speed}"

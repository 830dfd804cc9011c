"""The answer of a plan in words: the recipe to take, the nearest one, and the alternatives tried.
Also the one-line answer of ``plan --check``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from harness.planner import verdict
from harness.planner.before_step import Before
from harness.planner.eager import note_of
from harness.planner.edits import adapts
from harness.planner.explore import Search, option_of, within
from harness.planner.phase_needs import STEP
from harness.planner.plan.request import export_command
from harness.planner.verdict import Fit
from harness.report.figures.units import GIB

SMALL = GIB // 20
"""Bytes below which a category is not named: they round to 0.0 GiB."""
SAME = 0.005
"""Relative difference of two speeds below which neither recipe is called faster."""
MOST_NAMES = 4
"""Most settings that a verdict names as not counted."""
NAMED = 4
"""Most alternatives that an answer names."""
MUCH = 16 * GIB
"""Host memory of a node, in bytes, from which the answer states it."""
WORD = {"fits": "fits", "tight": "tight", "host": "host short", "no": "no",
        "unknown": "not predicted", "cannot": "cannot run"}  # fmt: skip
TRAINED = {True: "Adapters", False: "All weights"}
"""Whether most weights are frozen -> what is trained."""


def answered(
    fits: Sequence[Fit], proofs: Sequence[Search], tried: Sequence[Fit] | None
) -> list[str]:
    """Return the answers of searches; of a list without ``proofs`` one, or one for adapters and
    one for full training if it has both."""
    if proofs:
        lines = [line for proof in proofs for line in searched(proof, fits)]
        return [*lines, *tried_instead(tried)]
    kinds = {kind: [fit for fit in fits if adapts(fit.resolved) == kind] for kind in TRAINED}
    if tried is not None or not all(kinds.values()):
        return answer(fits, tried)
    return [line for kind, some in kinds.items() for line in (f"{TRAINED[kind]}:", *answer(some))]


def answer(fits: Sequence[Fit], tried: Sequence[Fit] | None = None) -> list[str]:
    """Return the fastest recipe that fits; if none does, the nearest and the alternatives."""
    best, least = verdict.fastest(fits), verdict.nearest(fits)
    if best is not None:
        head = "Fastest predicted to fit" if best.fits else "None is sure to fit. Fastest that may"
        others = {"least memory": least} if least is not None and least is not best else {}
        return [*_taken(head, best, others, fits), *([] if best.fits else tried_instead(tried))]
    if all(fit.lack for fit in fits):
        return ["None of these can run on this card; the lines below the table say what can."]
    if least is None:
        return ["Nothing could be predicted; the lines below the table say why."]
    head = f"None is predicted to fit. Nearest: {least.label} {lacks(least)}"
    return [head, *_peak(least), *tried_instead(tried)]


def searched(proof: Search, fits: Sequence[Fit]) -> list[str]:
    """Return the answer of a search, or the nearest recipe, and how many recipes were compared.
    ``fits``: all predictions of the plan."""
    kind, best, close = TRAINED[proof.adapters], proof.best, proof.nearest
    if best is not None:
        alike = [fit for fit in fits if adapts(fit.resolved) == proof.adapters]
        told = "" if best.fits else ", none sure to fit"
        count = f"  of {proof.recipes} recipes{told}: {counts_in_words(proof)}"
        return [*_taken(kind, best, proof.others, alike), count]
    word = "is predicted" if close is None else "fits"
    lines = [f"{kind}: none of {proof.recipes} recipes {word}: {counts_in_words(proof)}"]
    if close is not None:
        lines += [f"  nearest of those predicted: {close.label} {lacks(close)}", *_peak(close)]
    return lines


def _taken(head: str, best: Fit, others: Mapping[str, Fit], fits: Sequence[Fit]) -> list[str]:
    """Return the recipe to take, its numbers and its export command, then what is faster, smaller
    or more exact.
    ``others``: head -> recipe. ``fits``: those that train the same weights."""
    sure = "" if best.fits else ", may fit"
    lines = [f"{head}: {best.label}", f"  {rate_in_words(best)}, needs {reach(best)}{sure}"]
    lines[1] += on_host(best)
    if best.seconds:
        ends = (best.seconds.low, best.seconds.high)
        low, high = (f"{end:.2g}" if end < 100 else f"{end:.0f}" for end in ends)
        lines.append(f"  a step: at least {low} s, usually up to {high} s")
    lines += [f"  {note}" for note in [note_of(best.resolved)] if note] + _export(best)
    heads: dict[str, list[str]] = {}
    for name, fit in others.items():
        heads.setdefault(_offer(fit), []).append(name)
    lines += [f"  {' and '.join(names)}: {words}" for words, names in heads.items()]
    quick = verdict.fastest([fit for fit in fits if fit.verdict == "tight"])
    if quick and quick.samples_per_second > (1 + SAME) * best.samples_per_second:
        told = f"{quick.label}, {rate_in_words(quick)}, {reach(quick)}"
        lines.append(f"  faster, and may fit: {told}")
    timed = [fit for fit in fits if fit.fits and fit.seconds and fit is not best]
    if close := [fit for fit in timed if _alike(fit, best)]:
        close.sort(key=lambda fit: fit.seconds.total)
        others = f", and those of {len(close) - 1} more" * (len(close) > 1)
        lines.append(f"  its time cannot be told apart from that of {close[0].label}{others}")
    return lines


def _alike(one: Fit, other: Fit) -> bool:
    """Return True if two times cannot be told apart."""
    quick, slow = sorted((option_of(one), option_of(other)), key=lambda option: option.seconds)
    return within(slow, quick)


def counts_in_words(proof: Search) -> str:
    """Return how many recipes of a search were predicted, and why others were not."""
    predicted = len(proof.fits) - proof.failed
    left = proof.recipes - len(proof.fits) - proof.unable
    others = "not recorded (--fresh)" if proof.recorded else "not better by estimate"
    others = "not tried (stopped by Ctrl-C)" if proof.stopped else others
    counts = {
        "predicted": predicted,
        "not tried" if proof.failed and not predicted else others: left,
        "not for this card": proof.unable,
        "not predictable": proof.failed,
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _export(fit: Fit) -> list[str]:
    command = export_command(fit)
    return [f"  export it: {command}"] if command else []


def _peak(fit: Fit) -> list[str]:
    """Name the phase that needs more than the step, if any, then describe the step's peak."""
    lines = []
    if fit.binds != STEP:
        more = fit.phases[fit.binds]
        lines = [f"  needs the most in the phase {fit.binds}: {more.what}, {gib(more.gpu)} GiB"]
    return [*lines, f"  its peak: {peak_in_words(fit)}"]


def on_host(fit: Fit) -> str:
    """Return the host memory that a recipe needs, if it is ``MUCH`` or more."""
    if not fit.host_bytes or fit.host_bytes < MUCH or fit.gpu.shared:
        return ""
    return f", and {gib(fit.host_bytes)} of {gib(fit.host_memory)} GiB of host memory"


def fitting(tried: Iterable[Fit]) -> list[Fit]:
    """Return those that fit, the fastest first."""
    able = [fit for fit in tried if fit.fits]
    return sorted(able, key=lambda fit: -(fit.samples_per_second or 0))


def tried_instead(tried: Sequence[Fit] | None) -> list[str]:
    """Return the alternatives that fit, or that none does."""
    if able := fitting(tried or ()):
        head = f"Predicted to fit instead, of {len(tried)} tried, fastest first:"
        return [head, *(f"  {_offer(fit)}" for fit in able[:NAMED]), *_export(able[0])]
    least = verdict.nearest(tried or ())
    if least is None:
        return []
    told = f"None of {len(tried)} others tried fits; the least: {_offer(least)}"
    return [told, "--gpus 2 4 8 says whether more GPUs do."]


def _offer(fit: Fit) -> str:
    """Return a recipe with its speed and need; of one that does not fit, what it lacks."""
    if not fit.may_fit:
        return f"{fit.label} {lacks(fit)}"
    speed = f", {rate_in_words(fit)}" if fit.seconds else ""
    return f"{fit.label}{speed}, {gib(fit.need_bytes)} GiB{on_host(fit)}"


def in_words(fit: Fit) -> str:
    """Return the verdict, and which memory is tight.

    Where settings that are not counted may turn it: "cannot tell" if the lower end of what is
    counted does not fit, else "may fit".
    """
    if fit.verdict != "tight":
        return WORD[fit.verdict]
    if fit.tight_in and not fit.uncounted:
        return f"tight on the {fit.tight_in}"
    return "may fit" if fit.tight_in or fit.shortage <= 1 else "cannot tell"


def in_row(fit: Fit) -> str:
    """Return the verdict for a table."""
    return "host tight" if fit.tight_in == "host" else WORD[fit.verdict]


def reach(fit: Fit) -> str:
    """Return the need with its range and the card's memory: ``20.1 (17.0 to 23.2) of 24.0 GiB``."""
    between = f"({gib(fit.low_bytes)} to {gib(fit.most_bytes)})"
    return f"{bound(fit)}{gib(fit.need_bytes)} {between} of {gib(fit.gpu.memory_bytes)} GiB"


def bound(fit: Fit) -> str:
    """Return "at least ", "less than " or "about " for a need that leaves settings out; else
    nothing."""
    errs = {one.errs for one in fit.uncounted} - {"none"}
    words = {frozenset(): "", frozenset({"more"}): "at least ", frozenset({"less"}): "less than "}
    return words.get(frozenset(errs), "about ")


def of_uncounted(fit: Fit) -> str:
    """Return the settings that a prediction leaves out, after a colon; empty if there are none."""
    names = list(dict.fromkeys(one.what for one in fit.uncounted))
    more = f" and {len(names) - MOST_NAMES} more" * (len(names) > MOST_NAMES)
    verb = "is" if len(names) == 1 else "are"
    return f": {', '.join(names[:MOST_NAMES])}{more} {verb} not counted" if names else ""


def lacks(fit: Fit) -> str:
    """Return the missing memory of a recipe that does not fit: the GPU's or the host's."""
    if fit.verdict == "host":
        have, told = gib(fit.host_memory), fit.gpu.host_told or "assumed"
        return f"needs {gib(fit.host_bytes)} GiB of host memory, of {have} ({told})"
    return f"needs {gib(fit.need_bytes)} GiB, {gib(-fit.margin_bytes)} GiB more than a GPU has"


def needs_or_lacks(fit: Fit) -> str:
    """Return what a row needs, or the memory that it lacks; else why it was not predicted."""
    if fit.need_bytes is None:
        return fit.lack or fit.prediction.reason
    return f"needs {reach(fit)}" if fit.may_fit else lacks(fit)


def phases(fit: Fit) -> list[str]:
    """Return each phase's need and the reason for the largest; nothing if only the step counts."""
    if len(fit.phases) < 2:
        return []
    each = ", ".join(f"{name} {gib(one.gpu)}" for name, one in fit.phases.items())
    return [f"by phase: {each} GiB; {fit.binds} binds: {fit.phases[fit.binds].what}"]


def peak_in_words(fit: Fit) -> str:
    """Return the phase of a row's peak, and its three largest categories."""
    instant = fit.prediction.peak
    if instant is None:
        return "not traced"
    ordered = sorted(instant.categories.items(), key=lambda item: -item[1])[:3]
    parts = [f"{gib(size)} GiB {name.replace('_', ' ')}" for name, size in ordered if size >= SMALL]
    return f"in {instant.phase}: {', '.join(parts) or 'nothing that is large'}"


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


def gib(size: int | None) -> str:
    """Return bytes as GiB, for a table."""
    return "-" if size is None else f"{size / GIB:.1f}"


# ---- check ----
# ``plan --check`` guards a training by one line and an exit code. 0: predicted to fit, by the upper
# end of the range. 1: does not fit, may fit, cannot run, or was not predicted. 2: bad input.


def check_line(fit: Fit, tried: Sequence[Fit] | None, before: Before | None = None) -> str:
    """Return the verdict with its reason and margin, and the nearest alternative that fits."""
    if fit.lack:
        return f"cannot run: {fit.label}: {fit.lack}"
    if fit.need_bytes is None:
        return f"not predicted: {fit.label}: {fit.prediction.reason}"
    if fit.fits and before and not before.fits:
        return f"does not fit before its step, which needs {reach(fit)}: {before.short}"
    spec, card, note = fit.resolved.spec, fit.gpu, note_of(fit.resolved)
    size = f"{spec.model} with {fit.label}, global batch {spec.global_batch}, needs {reach(fit)} "
    size += f"({spec.processes} x {card.name}){of_uncounted(fit)}"
    host = ""
    if fit.host_bytes and not card.shared:
        have = f"{gib(fit.host_memory)} GiB of host memory ({card.host_told or 'assumed'})"
        host = f", {gib(fit.host_bytes)} of {have}"
    if fit.fits:
        free = f"fits: {size}, {gib(fit.margin_bytes)} GiB free{host}"
        return "; ".join(filter(None, [free, note, *phases(fit)]))
    why = f" ({phases(fit)[0]})" if phases(fit) else f" (its peak: {peak_in_words(fit)})"
    if fit.may_fit:
        said = f"{in_words(fit)}: {size}, may or may not fit{host}{why}"
        return "; ".join(filter(None, [said, note, _way(tried)]))
    short = f"{gib(-fit.margin_bytes)} GiB more than it has{why}"
    short = f"and {lacks(fit)}" if fit.verdict == "host" else short
    return f"does not fit: {size}, {short}; {_way(tried)}"


def _way(tried: Sequence[Fit] | None) -> str:
    """Return the fastest alternative that fits; else the smallest need."""
    if able := fitting(tried or ()):
        like = f" (speed assumed: {able[0].gpu.like})" if able[0].gpu.like else ""
        return f"fits: {_offer(able[0])}{like}"
    if least := verdict.nearest(tried or ()):
        return f"no alternative that was tried fits; the smallest is {_offer(least)}"
    return "no alternative was found"

"""The answer of a plan in words: the fastest that fits, the nearest, and what else was tried."""

from __future__ import annotations

from collections.abc import Sequence

from harness.memory.record import Instant
from harness.planner import verdict
from harness.planner.phase_needs import STEP
from harness.planner.plan.request import export_command
from harness.planner.suggestions import Ways
from harness.planner.verdict import Fit
from harness.report.figures.units import GIB

SMALL = GIB // 20
"""Bytes below which a category is not worth a word: they round to 0.0 GiB."""
ADAPTED = "frozen_weights"
"""The trait of recipes that train less than all weights."""
MUCH = 16 * GIB
"""Host memory of a node from which on it is worth a word."""


def answers(fits: Sequence[Fit], ways: Ways | None = None) -> list[str]:
    """The answer; where some recipes train adapters and others all weights, which are two things to
    want, the answer of each."""
    adapted = [fit for fit in fits if ADAPTED in fit.resolved.launch.traits]
    whole = [fit for fit in fits if fit not in adapted]
    if ways is not None or not adapted or not whole:
        return answer(fits, ways)
    kinds = {"Adapters, most weights frozen": adapted, "All weights": whole}
    return [line for head, some in kinds.items() for line in (f"{head}:", *answer(some))]


def answer(fits: Sequence[Fit], ways: Ways | None = None) -> list[str]:
    """The fastest recipe predicted to fit; if none fits, the nearest and what was tried then."""
    best = verdict.fastest(fits)
    if best is None:
        return _none_fits(fits) + _tried_instead(ways)
    head = "Fastest predicted to fit" if best.fits else "None is sure to fit. Fastest that may"
    lines = [f"{head}: {best.label}, {rate_in_words(best)}, {reach(best)}{_on_host(best)}"]
    lines += [*_binding(best), f"  its peak: {_explained(best)}"]
    lines += _export(best)
    lines += _faster_if_it_fits(best, fits) if best.fits else _tried_instead(ways)
    rivals = [f for f in fits if f.fits and f is not best and f.seconds]
    close = [f.label for f in rivals if _may_be_faster(f, best)]
    if close:
        lines.append(f"  within the uncertainty of time: {', '.join(close[:4])}")
    least = verdict.nearest(fits)
    if least is not None and least is not best:
        lines.append(f"Least memory: {least.label}, {_need(least)}{_on_host(least)}")
    return lines


def _export(fit: Fit) -> list[str]:
    """The command that writes a recipe's files for a trainer of one's own."""
    command = export_command(fit)
    return [f"  export it: {command}"] if command else []


def reach(fit: Fit) -> str:
    """The need with its range, and what a card has: ``20.1 (17.0 to 23.2) of 24.0 GiB``."""
    low = fit.need_bytes - fit.spread_bytes
    between = f"({gib(low)} to {gib(fit.most_bytes)})"
    return f"{gib(fit.need_bytes)} {between} of {gib(fit.gpu.memory_bytes)} GiB"


def phases(fit: Fit) -> list[str]:
    """Say each phase's need, and which is the largest and why; nothing if only the step counts."""
    if len(fit.phases) < 2:
        return []
    each = ", ".join(f"{name} {gib(one.gpu)}" for name, one in fit.phases.items())
    return [f"by phase: {each} GiB; {fit.binds} binds: {fit.phases[fit.binds].what}"]


def _binding(fit: Fit) -> list[str]:
    """Name the phase that needs more than the step, whose peak is told next."""
    more = fit.binds != STEP and fit.phases[fit.binds]
    return [f"  needs the most to {fit.binds}: {more.what}, {gib(more.gpu)} GiB"] if more else []


def lacks(fit: Fit) -> str:
    """What is short where a recipe does not fit: the GPU's memory, or the host's."""
    if fit.verdict == "host":
        have, told = gib(fit.host_memory), fit.gpu.host_told or "assumed"
        return f"needs {gib(fit.host_bytes)} GiB of host memory, of {have} ({told})"
    return f"needs {_need(fit)}, {gib(-fit.margin_bytes)} GiB more than a GPU has"


def _faster_if_it_fits(best: Fit, fits: Sequence[Fit]) -> list[str]:
    """The fastest of those that may fit, where it is faster than the fastest that does."""
    quick = verdict.fastest([fit for fit in fits if fit.verdict == "tight"])
    if quick is None or quick.samples_per_second <= best.samples_per_second:
        return []
    return [f"  faster, and may fit: {quick.label}, {rate_in_words(quick)}, {reach(quick)}"]


def _on_host(fit: Fit) -> str:
    """The host memory that a recipe wants, where it is more than many machines have free."""
    if not fit.host_bytes or fit.host_bytes < MUCH or fit.gpu.shared:
        return ""
    return f", and {gib(fit.host_bytes)} of {gib(fit.host_memory)} GiB of host memory"


def _may_be_faster(rival: Fit, best: Fit) -> bool:
    """Whether ``rival`` may be the faster of the two, each at its end of the uncertainty."""
    slow = best.seconds.total + best.seconds.spread / 2
    quick = rival.seconds.total - rival.seconds.spread / 2
    per_best = slow / best.resolved.spec.global_batch
    return quick / rival.resolved.spec.global_batch < per_best


def _explained(fit: Fit) -> str:
    instant = fit.prediction.peak
    if instant is None:
        return "not traced"
    parts = [f"{gib(size)} GiB {name}" for name, size in largest(instant, 3)]
    return f"{where(instant)}: {', '.join(parts) or 'nothing that is large'}"


def largest(instant: Instant, count: int) -> list[tuple[str, int]]:
    """Up to ``count`` categories that hold most at an instant, in words, and their bytes."""
    ordered = sorted(instant.categories.items(), key=lambda item: -item[1])[:count]
    return [(name.replace("_", " "), size) for name, size in ordered if size >= SMALL]


def where(instant: Instant) -> str:
    """Phase, op and source line of a peak."""
    return f"in {instant.phase} at {', '.join(filter(None, (instant.op, instant.site)))}"


def _none_fits(fits: Sequence[Fit]) -> list[str]:
    close = verdict.nearest(fits)
    if all(fit.lack for fit in fits):
        return ["None of these can run on this card; the notes above say what can."]
    if close is None:
        return ["Nothing could be predicted; the notes above say why."]
    return [
        f"None is predicted to fit. Nearest: {close.label} {lacks(close)}",
        *_binding(close),
        f"  its peak: {_explained(close)}",
    ]


def _need(fit: Fit) -> str:
    return f"{gib(fit.need_bytes)} GiB"


def _tried_instead(ways: Ways | None) -> list[str]:
    """What was tried beyond the plan: what fits, or that nothing does, and on how many GPUs."""
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
    """The fewest of the GPUs tried that would do."""
    if not wider:
        return []
    first = next((fit for fit in wider if fit.fits), None)
    if first is None:
        tried = ", ".join(str(fit.resolved.spec.processes) for fit in wider)
        return [f"Nor does {wider[0].label} on {tried} GPUs"]
    spec = first.resolved.spec
    return [f"On {spec.processes} GPUs, global batch {spec.global_batch}: {_offer(first)}"]


# ---- numbers ----


def rate(fit: Fit) -> str:
    """Samples a second of the whole job; of a large model a part of one."""
    speed = fit.samples_per_second
    return f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}"


def rate_in_words(fit: Fit) -> str:
    """The same with what the samples are."""
    return f"{rate(fit)} {kind_of_sample(fit)}s/s"


def kind_of_sample(fit: Fit) -> str:
    """Whether a sample is an image or a video."""
    return "video" if fit.resolved.subject.samples_up("frames") else "image"


def near(size: int | None, spread: int | None) -> str:
    """Bytes as GiB with what they may be off by, for a table: 20.1 and its 3.6."""
    return "-" if size is None else f"{gib(size)} \u00b1{gib(spread)}"


def gib(size: int | None) -> str:
    """Bytes as GiB, for a table."""
    return "-" if size is None else f"{size / GIB:.1f}"


# ---- held ----
# What CUDA's allocator may hold of a GPU beyond what a plan says it reserves.


def held_back(fit: Fit) -> int:
    """Bytes at most, of one GPU, beyond ``need_bytes``.

    ZeRO-3 gathers on a stream of its own and lets go of weights by ``Tensor.record_stream``
    (DeepSpeed 0.19.8, partition_parameters.py, ``free_param``): their memory is given out again
    once the GPU has used them. The host is ahead by then and has gathered the next ones into other
    memory; how far ahead nobody says, so at most all weights stand gathered at once. A prediction
    has those that the host knows of. Nothing fails by it: before it gives up, the allocator waits
    for what is held (torch 2.13, CUDACachingAllocator.cpp, ``release_cached_blocks``).
    """
    instant, launch = fit.prediction.peak, fit.resolved.launch
    if instant is None or fit.gpu.shared or "gathers_ahead" not in launch.traits:
        return 0
    itemsize = 2 if "half_compute" in launch.traits else 4
    whole = fit.resolved.subject.parameters * itemsize
    return max(0, whole - instant.categories.get("gathered", 0))


def held_notes(fits: Sequence[Fit]) -> list[str]:
    """Of the rows that may fit, where it may be more than what is left of the card."""
    able = [fit for fit in fits if fit.may_fit and held_back(fit) > max(0, fit.margin_bytes)]
    return [
        f"{fit.label}: up to {gib(held_back(fit))} GiB more, gathered weights that are let go of, "
        "may be held until the GPU has used them: the allocator would then wait, which is slow."
        for fit in able
    ]


# ---- check ----
# ``plan --check``: a guard in front of a training, one line and an exit code.
#
# 0: it is predicted to fit, by the upper end of its range. 1: it is not, what there is lies within
# the range, it cannot run on the card, or there is no prediction. 2: bad input.


def check_line(fit: Fit, ways: Ways | None) -> str:
    """Whether it fits, why and by how much, and the nearest that does."""
    if fit.lack:
        return f"cannot run: {fit.label}: {fit.lack}"
    if fit.need_bytes is None:
        return f"not predicted: {fit.label}: {fit.prediction.reason}"
    if fit.fits:
        free = f"{gib(fit.margin_bytes)} GiB free"
        return "; ".join([f"fits: {_size(fit)}, {free}{_host(fit)}", *phases(fit)])
    if fit.may_fit:
        return f"tight: {_size(fit)}, may fit and may not{_host(fit)}{_why(fit)}; {_way(ways)}"
    if fit.verdict == "host":
        return f"does not fit: {_size(fit)}, and {lacks(fit)}; {_way(ways)}"
    short = gib(-fit.margin_bytes)
    return f"does not fit: {_size(fit)}, {short} GiB more than it has{_why(fit)}; {_way(ways)}"


def _size(fit: Fit) -> str:
    spec, card = fit.resolved.spec, fit.gpu
    return (
        f"{spec.model} with {fit.label}, global batch {spec.global_batch}, needs "
        f"{reach(fit)} ({spec.processes} x {card.name})"
    )


def _host(fit: Fit) -> str:
    """The host memory that was judged."""
    if not fit.host_bytes or fit.gpu.shared:
        return ""
    told = fit.gpu.host_told or "assumed"
    return f", {gib(fit.host_bytes)} of {gib(fit.host_memory)} GiB of host memory ({told})"


def _why(fit: Fit) -> str:
    """The largest of what lived at the peak; of several phases, what each needs."""
    instant = fit.prediction.peak
    if told := phases(fit):
        return f" ({told[0]})"
    if instant is None:
        return ""
    parts = [f"{gib(size)} {name}" for name, size in largest(instant, 2)]
    return f" (at its peak in {instant.phase} {', '.join(parts)})"


def _way(ways: Ways | None) -> str:
    """The nearest that fits: on these GPUs, else on more of them, else how far the least is off."""
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
        return "nothing else was found"
    return (
        f"nothing that was tried fits, the least is {least.label} with {gib(least.need_bytes)} GiB"
    )


def _offer_of_check(fit: Fit) -> str:
    speed = f", {rate_in_words(fit)}" if fit.seconds else ""
    speed += f" (speed assumed: {fit.gpu.like})" if speed and fit.gpu.like else ""
    return f"{fit.label}, {gib(fit.need_bytes)} GiB{speed}"

"""A plan in a terminal: progress, the table, and the answer in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.markup import escape

from harness.memory.record import Instant
from harness.predict import beside, verdict
from harness.predict.speed import calibrated
from harness.predict.speed.cards import Card
from harness.predict.verdict import Fit
from harness.predict.ways_out import Ways
from harness.report.data.grid import text_grid
from harness.report.figures.units import GIB
from harness.report.rendering.narrow import draw
from harness.spec import Spec

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    *(
        "ADAPTED",
        "LOOK",
        "SHOWN",
        "WORD",
        "answer",
        "answers",
        "gib",
        "notes",
        "order",
        "print_plan",
    ),
    *("rate", "rate_in_words", "setting", "where"),
]

SHOWN = {
    "params": ("parameters", "gathered"),
    "grads": ("gradients", "buckets"),
    "optim": ("optimizer_state",),
    "ema": ("ema",),
    "activ": ("activations", "recomputed", "autocast"),
    "other": ("temporaries",),
}
WORD = {"fits": "fits", "tight": "tight", "no": "no", "unknown": "not predicted",
        "cannot": "cannot run"}  # fmt: skip
ON_GPU = (
    "GiB of one GPU; Host: of a node. Needs: what the allocator reserves, library "
    "workspaces, CUDA context and NCCL."
)
ON_CPU = "GiB. Needs: tensors, interpreters and libraries of all processes, which share the memory."
SMALL = GIB // 20
"""Bytes below which a category is not worth a word: they round to 0.0 GiB."""
LEAST_WORTH = ("other", "ema", "Host", "grads", "params", "optim", "activ", "Step ms")
"""Heads of columns that give way first in a narrow terminal."""
ADAPTED = "frozen_weights"
"""The trait of recipes that train less than all weights."""
MUCH = 16 * GIB
"""Host memory of a node from which on it is worth a word."""
SPEED = {"image": "Img/s", "video": "Vid/s"}
"""What a sample is -> head of the column of speeds."""
LOOK = {"fits": "green", "tight": "yellow", "no": "red", "unknown": "dim", "cannot": "dim"}


def print_plan(
    fits: Sequence[Fit], refused: Sequence[tuple[str, str]], ways: Ways | None, console: Console
) -> None:
    """The table, fastest first among those that fit, and the answer."""
    console.print(setting(fits), highlight=False)
    ordered = sorted(fits, key=order)
    kinds = {"Recipe": "text", "": "flag"}
    speed = SPEED[kind_of_sample(fits[0])]
    kinds |= dict.fromkeys(("Needs", "Free", *SHOWN, "Host", "Step ms", speed), "number")
    grid = text_grid("plan", "", kinds, [_cells(fit) for fit in ordered])
    best = [("reference",) if fit is verdict.fastest(fits) else () for fit in ordered]
    looks = {"": {WORD[word]: look for word, look in LOOK.items()}}
    draw(replace(grid, marks=best), console, least_worth=LEAST_WORTH, styles=looks)
    for text in notes(fits):
        console.print(text, style="dim", highlight=False)
    for name, reason in refused:
        console.print(f"[yellow]refused[/yellow] {escape(name)}: {escape(reason)}")
    console.print()
    for line in answers(fits, ways):
        console.print(escape(line), highlight=False)


def order(fit: Fit) -> tuple[int, float]:
    """What fits first, the fastest of it before; then what needs least."""
    rank = ["fits", "tight", "no", "unknown", "cannot"].index(fit.verdict)
    speed = fit.samples_per_second or 0.0
    return (rank, -speed if rank < 2 else float(fit.need_bytes or 0))


def setting(fits: Sequence[Fit]) -> str:
    """What a table is of: model, size of a sample, batch, cards."""
    spec, card = max((f.resolved.spec for f in fits), key=lambda s: s.processes), fits[0].gpu
    size = fits[0].resolved.subject.size_in_words
    on = f"{spec.processes} processes on" if card.shared else f"{spec.processes} x"
    return (
        f"{spec.model} at {size}, global batch {spec.global_batch}, "
        f"{on} {card.words}{_nodes(spec, card)}"
    )


def _nodes(spec: Spec, card: Card) -> str:
    """On how many machines, where more than one."""
    count = -(-spec.processes // card.node)
    if count < 2 or card.shared:
        return ""
    speed = f"{card.network_bandwidth / 1e9:.3g} GB/s between them"
    return f" on {count} nodes, {speed} ({card.network_told or 'typical'})"


def _cells(fit: Fit) -> list[str]:
    instant = fit.prediction.peak
    split = [
        gib(sum(instant.categories.get(n, 0) for n in names)) if instant else "-"
        for names in SHOWN.values()
    ]
    time_cell, speed = "-", "-"
    if fit.seconds:
        time_cell = f"{fit.seconds.total * 1e3:.0f} ±{fit.seconds.spread * 1e3:.0f}"
        speed = rate(fit)
    cells = [fit.label, WORD[fit.verdict], gib(fit.need_bytes), gib(fit.margin_bytes)]
    return [*cells, *split, gib(fit.host_bytes), time_cell, speed]


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


def gib(size: int | None) -> str:
    """Bytes as GiB, for a table."""
    return "-" if size is None else f"{size / GIB:.1f}"


def notes(fits: Sequence[Fit]) -> list[str]:
    """What the numbers mean and rest on, and what could not be said."""
    notes = [
        ON_CPU if fits[0].gpu.shared else ON_GPU,
        f"Columns between: the peak instant of live tensors. {calibrated.words(fits[0].gpu)}",
    ]
    notes += _beside(fits[0])
    single = [f for f in fits if f.resolved.spec.processes == 1]
    if single and len(single) < len(fits):
        notes.append("Recipes of one process train the whole global batch on one GPU.")
    notes += [verdict.assumed(fits[0].gpu), *verdict.lacking(fits)]
    for fit in fits:
        if not fit.lack and fit.prediction.method != "trace":
            notes.append(f"* {fit.label}: not predicted: {fit.prediction.reason}")
        notes += [f"{fit.label}: {note}" for note in fit.prediction.notes]
    return notes


def _beside(fit: Fit) -> list[str]:
    """What else stays on each GPU: what was counted, or what a public model's own would be."""
    if fit.gpu.beside_told:
        return [fit.gpu.beside_told]
    own = beside.of(beside.usual_of(fit.resolved.spec.model), "")
    if not own:
        return []
    names, total = ", ".join(one.name for one in own), sum(one.bytes for one in own)
    return [
        f"Not counted: {names}, {gib(total)} GiB in 16 bits where they stay on the GPU: "
        "--also usual counts them."
    ]


# ---- words ----


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
    lines = [
        f"Fastest predicted to fit: {best.label}, {rate_in_words(best)}, "
        f"{gib(best.need_bytes)} of {gib(best.gpu.memory_bytes)} GiB"
        + (" (tight: the allocator must return its cache)" if best.verdict == "tight" else "")
        + _on_host(best)
    ]
    lines.append(f"  its peak: {_explained(best)}")
    rivals = [f for f in fits if f.verdict == "fits" and f is not best and f.seconds]
    close = [f.label for f in rivals if _may_be_faster(f, best)]
    if close:
        lines.append(f"  within the uncertainty of time: {', '.join(close[:4])}")
    least = verdict.nearest(fits)
    if least is not None and least is not best:
        lines.append(f"Least memory: {least.label}, {gib(least.need_bytes)} GiB")
    return lines


def _on_host(fit: Fit) -> str:
    """The host memory that a recipe wants, where it is more than many machines have free."""
    if not fit.host_bytes or fit.host_bytes < MUCH or fit.gpu.shared:
        return ""
    return f", and {gib(fit.host_bytes)} GiB of host memory"


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
    largest = sorted(instant.categories.items(), key=lambda item: -item[1])[:3]
    parts = [f"{gib(size)} GiB {name.replace('_', ' ')}" for name, size in largest if size >= SMALL]
    return f"{where(instant)}: {', '.join(parts) or 'nothing that is large'}"


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
        f"None is predicted to fit. Nearest: {close.label} needs {_need(close)}, "
        f"{gib(-close.margin_bytes)} GiB more than a GPU has",
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
        return [f"Predicted to fit instead, of {len(ways.tried)} tried, fastest first:", *lines]
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

"""A plan in a terminal: the table, what it rests on, and the answer in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.markup import escape

from harness.commands.planning.plan.answer import (
    answers,
    gib,
    kind_of_sample,
    near,
    phases,
    rate,
)
from harness.commands.planning.plan.held import held_notes
from harness.commands.planning.plan.why import why
from harness.predict import beside, residuals, verdict
from harness.predict.speed import calibrated
from harness.predict.speed.cards import Card
from harness.predict.speed.rates import ISSUE
from harness.predict.speed.roofline import issued
from harness.predict.verdict import Fit
from harness.predict.ways_out import Ways
from harness.report.data.grid import text_grid
from harness.report.rendering.narrow import print_grid
from harness.spec import Spec

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["LOOK", "SHOWN", "WORD", "notes", "order", "print_plan", "setting"]

SHOWN = {
    "params": ("parameters", "gathered"),
    "grads": ("gradients", "buckets"),
    "optim": ("optimizer_state",),
    "ema": ("ema",),
    "activ": ("activations", "recomputed", "autocast"),
    "other": ("temporaries",),
}
WORD = {"fits": "fits", "tight": "tight", "host": "host short", "no": "no",
        "unknown": "not predicted", "cannot": "cannot run"}  # fmt: skip
ON_GPU = (
    "GiB of one GPU; Host: of a node. Needs: what the allocator reserves, library "
    "workspaces, CUDA context and NCCL. fits: so do the upper ends of Needs and Host. tight: what "
    "there is lies within a range."
)
ON_CPU = "GiB. Needs: tensors, interpreters and libraries of all processes, which share the memory."
LEAST_WORTH = ("other", "ema", "grads", "params", "optim", "activ", "Step ms")
"""Heads of columns that give way first in a narrow terminal."""
STAYS = ("", "Needs", "Host")
"""Heads of columns that never do: they decide the verdict."""
SPEED = {"image": "Img/s", "video": "Vid/s"}
"""What a sample is -> head of the column of speeds."""
LOOK = {"fits": "green", "tight": "yellow", "host": "red", "no": "red", "unknown": "dim",
        "cannot": "dim"}  # fmt: skip


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
    grid = replace(grid, marks=best)
    print_grid(grid, console, least_worth=LEAST_WORTH, stays=STAYS, styles=looks)
    for text in notes(fits):
        console.print(text, style="dim", highlight=False)
    for name, reason in refused:
        console.print(f"[yellow]refused[/yellow] {escape(name)}: {escape(reason)}")
    console.print()
    for line in [*answers(fits, ways), *why(fits)]:
        whole = "./run.sh" in line  # a command that is folded cannot be copied
        console.print(escape(line), highlight=False, soft_wrap=whole)


def order(fit: Fit) -> tuple[int, float]:
    """What fits first, the fastest of it before; then what needs least."""
    rank, speed = verdict.VERDICTS.index(fit.verdict), fit.samples_per_second or 0.0
    return (rank, -speed if fit.may_fit else float(fit.need_bytes or 0))


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
    need = near(fit.need_bytes, fit.spread_bytes)
    cells = [fit.label, WORD[fit.verdict], need, gib(fit.margin_bytes)]
    return [*cells, *split, gib(fit.host_bytes), time_cell, speed]


def notes(fits: Sequence[Fit]) -> list[str]:
    """What the numbers mean and rest on, and what could not be said."""
    notes = [
        ON_CPU if fits[0].gpu.shared else ON_GPU,
        f"Columns between: the peak instant of live tensors. {calibrated.words(fits[0].gpu)}",
    ]
    notes += [*uncertain(fits), *host(fits[0]), *_beside(fits[0]), *_before(fits[0])]
    single = [f for f in fits if f.resolved.spec.processes == 1]
    if single and len(single) < len(fits):
        notes.append("Recipes of one process train the whole global batch on one GPU.")
    notes += [verdict.assumed(fits[0].gpu), *verdict.lacking(fits), *held_notes(fits)]
    return [*notes, *_host_bound(fits), *_of_each(fits)]


def _host_bound(fits: Sequence[Fit]) -> list[str]:
    """Name the rows whose step time the host sets, and the least time that it sets."""
    bound = [fit for fit in fits if fit.seconds and fit.seconds.overhead]
    if not bound:
        return []
    some = "every row" if len(bound) == len(fits) else ", ".join(fit.label for fit in bound)
    least = min(issued(fit.prediction.work) for fit in bound)
    return [
        f"The host, not the card, sets the step time of {some}: Python issues {least:,} or more "
        f"operations a step, each in {ISSUE * 1e6:.0f} microseconds. That floor of the host is "
        f"{ISSUE * least:.2f} s on any card. A larger batch costs no time until the card is slower."
    ]


def uncertain(fits: Sequence[Fit]) -> Iterator[str]:
    """What the ranges of memory rest on: a sentence for classes with rows enough of their own, and
    one for those without."""
    known = {fit.uncertainty for fit in fits if fit.need_bytes is not None}
    for one in sorted(known, key=lambda one: one.pooled):
        words, share = residuals.CLASSES[one.kind], f"+-{100 * one.share:.0f} %"
        rows = f"{one.rows} public measurements of {one.models} models"
        if not one.pooled:
            why = f"from {rows}, to hold for nine of ten other models"
        elif one.rows:
            why = f"{rows} are too few alone, and all classes count"
        else:
            why = residuals.UNMEASURED.get(one.kind, "nobody's measurement is of this class")
            why += ", and all classes count"
        yield f"Memory {share} ({words}): {why}."


def host(fit: Fit) -> list[str]:
    """The host memory that was judged against, and where that is from."""
    card, processes = fit.gpu, fit.resolved.spec.processes
    if card.shared:
        return []
    size = f"{gib(card.host_bytes(max(processes, 1)))} GiB"
    if card.host_told:
        return [f"Host memory of a machine: {size}, {card.host_told}."]
    share = card.host_share // 2**30
    return [
        f"Host memory: {share} GiB assumed for each GPU, its own or its share of a server; "
        "--host-memory SIZE gives a machine's."
    ]


def _of_each(fits: Sequence[Fit]) -> Iterator[str]:
    """What is said of single recipes; of several alike once."""
    told: dict[str, list[str]] = {}
    for fit in fits:
        yield from (f"{fit.label}: {text}" for text in phases(fit))
        if not fit.lack and fit.prediction.method != "trace":
            yield f"* {fit.label}: not predicted: {fit.prediction.reason}"
        for note in fit.prediction.notes:
            told.setdefault(note, []).append(fit.label)
    yield from (f"{', '.join(labels)}: {note}" for note, labels in told.items())


def _before(fit: Fit) -> list[str]:
    """What was on each GPU before the training."""
    before = fit.resolved.spec.before
    return [beside.before_words(before)] if before else []


def _beside(fit: Fit) -> list[str]:
    """What else stays on each GPU: what was counted, or what a public model's own would be."""
    if fit.gpu.beside_told:
        return [fit.gpu.beside_told]
    own = beside.of(beside.usual_of(fit.resolved.spec.model), "")
    if not own:
        return []
    names, total = ", ".join(one.name for one in own), sum(one.bytes for one in own)
    uncounted = "Not counted" + " in the step" * bool(fit.resolved.spec.phases)
    return [
        f"{uncounted}: {names}, {gib(total)} GiB in 16 bits where they stay on the GPU: "
        "--also usual counts them."
    ]

"""A plan in a terminal: the table, what it rests on, and the answer in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.markup import escape

from harness.commands.planning.plan.answer import answers, gib, kind_of_sample, rate
from harness.commands.planning.plan.held import held_notes
from harness.commands.planning.plan.why import why
from harness.predict import beside, verdict
from harness.predict.speed import calibrated
from harness.predict.speed.cards import Card
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
WORD = {"fits": "fits", "tight": "tight", "no": "no", "unknown": "not predicted",
        "cannot": "cannot run"}  # fmt: skip
ON_GPU = (
    "GiB of one GPU; Host: of a node. Needs: what the allocator reserves, library "
    "workspaces, CUDA context and NCCL."
)
ON_CPU = "GiB. Needs: tensors, interpreters and libraries of all processes, which share the memory."
LEAST_WORTH = ("other", "ema", "Host", "grads", "params", "optim", "activ", "Step ms")
"""Heads of columns that give way first in a narrow terminal."""
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
    print_grid(replace(grid, marks=best), console, least_worth=LEAST_WORTH, styles=looks)
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


def notes(fits: Sequence[Fit]) -> list[str]:
    """What the numbers mean and rest on, and what could not be said."""
    notes = [
        ON_CPU if fits[0].gpu.shared else ON_GPU,
        f"Columns between: the peak instant of live tensors. {calibrated.words(fits[0].gpu)}",
    ]
    notes += [*_beside(fits[0]), *_before(fits[0])]
    single = [f for f in fits if f.resolved.spec.processes == 1]
    if single and len(single) < len(fits):
        notes.append("Recipes of one process train the whole global batch on one GPU.")
    notes += [verdict.assumed(fits[0].gpu), *verdict.lacking(fits), *held_notes(fits)]
    return [*notes, *_of_each(fits)]


def _of_each(fits: Sequence[Fit]) -> Iterator[str]:
    """What is said of single recipes; of several alike once."""
    told: dict[str, list[str]] = {}
    for fit in fits:
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
    return [
        f"Not counted: {names}, {gib(total)} GiB in 16 bits where they stay on the GPU: "
        "--also usual counts them."
    ]

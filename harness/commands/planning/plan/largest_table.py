"""The answer of ``plan --largest`` in a terminal: what fits, what does not, and what is open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from harness.commands.planning.plan.answer import lacks, reach
from harness.commands.planning.plan.table import host, uncertain
from harness.predict import verdict
from harness.predict.inverses import SOUGHT
from harness.predict.search import Largest
from harness.predict.verdict import Fit
from harness.report.data.grid import Grid
from harness.report.figures.units import GIB
from harness.report.rendering.narrow import print_grid
from harness.resolve import Resolved

if TYPE_CHECKING:
    from rich.console import Console

    from harness.commands.planning.plan.asked import Asked

__all__ = ["print_largest"]


def print_largest(answers: Sequence[Largest], what: str, asked: Asked, console: Console) -> None:
    """A line a recipe, as it was asked: the size that fits, and the next that does not."""
    name = SOUGHT[what].named
    heads = ["Recipe", "Largest that fits", "Needs GiB", "Next larger", "Needs GiB"]
    lines = [
        [
            answer.recipe,
            name(answer.fits.resolved) + _how(answer.fits) if answer.fits else "-",
            _need(answer.fits),
            name(answer.over.resolved) + _how(answer.over) if answer.over else "-",
            _need(answer.over),
        ]
        for answer in answers
    ]
    console.print(_head(what, asked), highlight=False)
    kinds = ["number" if "GiB" in head else "text" for head in heads]
    none = [() for _ in lines]
    grid = Grid(key="largest", title="", heads=heads, kinds=kinds, lines=lines, marks=none)
    print_grid(grid, console, least_worth=())
    for answer in answers:
        for line in _remarks(answer, name):
            console.print(f"{escape(answer.recipe)}: {escape(line)}", highlight=False)
    for recipe, reason in asked.refused:
        console.print(f"[yellow]refused[/yellow] {escape(recipe)}: {escape(reason)}")
    known = [fit for answer in answers for fit in (answer.fits, answer.over) if fit]
    told = [*uncertain(known), *(host(known[0]) if known else [])]
    for text in (*told, verdict.assumed(asked.gpu)):
        console.print(text, style="dim", highlight=False)
    text = "Every size in the table was predicted by itself, none by a line through others."
    console.print(text, style="dim", highlight=False)


def _need(fit: Fit | None) -> str:
    """GiB, to a hundredth: neighbours differ by little; with what they may be off by."""
    return f"{fit.need_bytes / GIB:.2f} \u00b1{fit.spread_bytes / GIB:.1f}" if fit else "-"


def _how(fit: Fit) -> str:
    """A mark for a size that may fit, and for one for which only the host's memory is short."""
    return {"tight": " (tight)", "host": " (host short)"}.get(fit.verdict, "")


def _head(what: str, asked: Asked) -> str:
    row, card = max(asked.resolved, key=lambda r: r.spec.processes), asked.gpu
    fixed = [] if what == "model" else [row.spec.model]
    size, processes = row.subject.size_in_words, row.spec.processes
    fixed += [] if what in ("resolution", "frames") else [f"at {size}"]
    batch = "" if what == "batch" else f", global batch {row.spec.global_batch}"
    return f"Largest {SOUGHT[what].words}: {' '.join(fixed)}{batch}, {processes} x {card.words}"


def _remarks(answer: Largest, name: Callable[[Resolved], str]) -> list[str]:
    """Where the answer is less than "this fits, and the next does not"."""
    remarks = [answer.stopped] if answer.stopped else []
    if answer.fits is None and answer.over is not None:
        remarks.append(f"not even {name(answer.over.resolved)} fits")
    if answer.fits is not None and not answer.exact and answer.over is not None:
        remarks.append(
            f"between {name(answer.fits.resolved)} and {name(answer.over.resolved)}, after "
            f"{answer.tried} predictions; what lies between was not predicted"
        )
    if answer.fits is not None and answer.over is None and not answer.stopped:
        end = "the search ends there" if answer.exact else f"after {answer.tried} predictions"
        remarks.append(f"{name(answer.fits.resolved)} or more: {end}")
    over = answer.over
    if over is not None and over.may_fit:
        remarks.append(f"{name(over.resolved)} may fit: {reach(over)}")
    elif over is not None and over.verdict == "host":
        remarks.append(f"{name(over.resolved)} {lacks(over)}")
    return remarks

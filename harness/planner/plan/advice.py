"""Further questions of ``plan``: ``--advise`` moves one knob at a time, and ``--largest`` searches
for the largest size that fits."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from harness.commands.console import OK
from harness.commands.options import write_answer
from harness.planner import edits, search, verdict
from harness.planner.edits import Move
from harness.planner.plan.answer import SAME, answer, gib, in_words, lacks, needs_or_lacks, reach
from harness.planner.plan.candidates import Asked
from harness.planner.plan.request import fit_as_json
from harness.planner.plan.table import (
    columns,
    host,
    of_fit,
    print_lines,
    print_notes,
    print_rows,
    setting,
    uncertain,
)
from harness.planner.plan.tracing import Asking, demand
from harness.planner.search import Largest
from harness.planner.verdict import Fit
from harness.report.data.grid import Column
from harness.report.figures.units import GIB
from harness.resolve import Resolved
from strategies.base import BadInput

NAMED = 4
"""Number of moves that a sentence names."""
NOTE = (
    "Buys: GiB that the move saves of the recipe's need. Time: time of a sample relative "
    "to the recipe's, with typical figures."
)


class Moved(NamedTuple):
    """A change of one recipe, with its fit."""

    move: Move
    fit: Fit


def print_advice(
    given: Fit, moved: Sequence[Moved], lines: Sequence[str], console: Console, *, whole: bool
) -> None:
    """Print the recipe, its moves by knob, the conclusions (``lines``) and notes."""
    console.print(setting([given]), highlight=False)
    mark = ":" if given.need_bytes is None else ","
    state = f"{in_words(given)}{mark} {needs_or_lacks(given)}"
    console.print(escape(f"From {given.label}: {state}"), highlight=False)

    def buys(row: Moved) -> str:
        known = given.need_bytes is not None and row.fit.need_bytes is not None
        return gib(given.need_bytes - row.fit.need_bytes if known else None)

    heads = {row.move.knob: row for row in reversed(moved)}  # the first of each knob has its name
    own = [
        Column("Knob", lambda row: row.move.knob * (row is heads[row.move.knob])),
        Column("Moved to", lambda row: row.move.to),
        *of_fit(columns(["", "Needs"], given)),
        Column("Buys", buys, "number"),
        Column("Time", lambda row: time_of(row.fit, given), "number"),
    ]
    print_rows(own, moved, console)
    print_lines(lines, console)
    print_notes([given], console, whole, [NOTE])


def time_of(fit: Fit, given: Fit) -> str:
    """Return a sample's time relative to ``given``, as ``+30 %`` or ``x3.1``; ``-``: unknown."""
    if not fit.samples_per_second or not given.samples_per_second:
        return "-"
    times = given.samples_per_second / fit.samples_per_second
    if times >= 2:
        return f"x{times:.1f}"
    return "0 %" if abs(times - 1) < SAME else f"{100 * (times - 1):+.0f} %"


def advice_lines(given: Fit, moved: Sequence[Moved], tried: Sequence[Fit] | None) -> list[str]:
    """Return the moves that make the recipe fit or faster, up to ``NAMED``, the fastest first."""
    if given.need_bytes is None:
        return ["The recipe was not predicted, so no move can be compared with it."]
    rows = [row for row in moved if row.fit.fits]
    if not given.fits and not rows:
        return ["No single move makes it fit.", *answer([given], tried)]
    head = "It fits. Faster, and fits too" if given.fits else "It begins to fit with one move"
    least = (1 + SAME) * (given.samples_per_second or math.inf) if given.fits else 0.0
    rows = [row for row in rows if (row.fit.samples_per_second or 0.0) >= least]
    if not rows:
        return [f"{head}: none of these moves."]
    rows.sort(key=lambda row: -(row.fit.samples_per_second or 0.0))
    return [
        f"{head}, the fastest first:",
        *(f"  {move.knob}: {move.to} ({gib(fit.need_bytes)} GiB, time {time_of(fit, given)})"
          for move, fit in rows[:NAMED]),
    ]  # fmt: skip


PREDICTED = "Every size in the table was predicted; none is interpolated."
UNSURE = ("tight", "fits", "host")
"""Verdicts of a next larger size that are worth a remark."""


def print_largest(answers: Sequence[Largest], what: str, asked: Asked, console: Console) -> None:
    """Print a line for each recipe: the largest size that fits, and the next that does not."""
    sizes, name = answers[0].sizes, answers[0].sizes.named
    own = [
        Column("Recipe", lambda row: row.recipe),
        Column("Largest that fits", lambda row: _size(row.fits, name)),
        Column("Needs GiB", lambda row: _need(row.fits), "number"),
        Column("Next larger", lambda row: _size(row.over, name)),
        Column("Needs GiB", lambda row: _need(row.over), "number"),
    ]
    row, card = max(asked.resolved, key=lambda r: r.spec.processes), asked.gpu
    fixed = "" if what in ("resolution", "frames") else f" at {row.subject.size_in_words}"
    fixed += "" if what == "batch" else f", global batch {row.spec.global_batch}"
    head = f"Largest {sizes.words}: {row.spec.model}{fixed}"
    console.print(f"{head}, {row.spec.processes} x {card.words}", highlight=False)
    print_rows(own, answers, console)
    for told in answers:
        for line in _remarks(told, name):
            console.print(f"{escape(told.recipe)}: {escape(line)}", highlight=False)
    for recipe, reason in asked.refused:
        console.print(f"[yellow]refused[/yellow] {escape(recipe)}: {escape(reason)}")
    known = [fit for answer in answers for fit in (answer.fits, answer.over) if fit]
    basis = [*uncertain(known), *(host(fit) for fit in known[:1]), verdict.assumed(asked.gpu)]
    for text in (*filter(None, basis), PREDICTED):
        console.print(text, style="dim", highlight=False)


def _need(fit: Fit | None) -> str:
    """Return the need to a hundredth of a GiB, since neighbouring sizes differ by little."""
    return f"{fit.need_bytes / GIB:.2f} \u00b1{fit.spread_bytes / GIB:.1f}" if fit else "-"


def _size(fit: Fit | None, name: Callable[[Resolved], str]) -> str:
    """Return a size; one that may fit, or that only host memory is too small for, is marked."""
    mark = f" ({in_words(fit)})" if fit and fit.verdict in ("tight", "host") else ""
    return name(fit.resolved) + mark if fit else "-"


def _remarks(answer: Largest, name: Callable[[Resolved], str]) -> list[str]:
    """Return what qualifies the answer: an early stop, untested sizes, or tight fits."""
    remarks, fits, over = [answer.stopped] if answer.stopped else [], answer.fits, answer.over
    if over is None:
        end = "the search ends there" if answer.exact else f"after {answer.tried} predictions"
        known = fits is not None and not answer.stopped
        return [*remarks, *([f"{name(fits.resolved)} or more: {end}"] if known else [])]
    if fits is None:
        remarks.append(f"not even {name(over.resolved)} fits")
    elif not answer.exact:
        remarks.append(
            f"between {name(fits.resolved)} and {name(over.resolved)}, "
            f"after {answer.tried} predictions; sizes between them were not predicted"
        )
    may = f"may fit: {reach(over)}" if over.may_fit else lacks(over)
    return [*remarks, *([f"{name(over.resolved)} {may}"] if over.verdict in UNSURE else [])]


def plan_largest(options: argparse.Namespace, asking: Asking, console: Console) -> int:
    """Search for each recipe's largest size, print the answers, and return the exit code.

    Of a lattice, the recipes are the plan's answers, or what needs the least, and rows without such
    a size are left out; others are told as refused.

    Raises:
        BadInput: no recipe has such a size.
    """
    what, asked = options.largest, asking.asked
    reasons = [(row, search.unable(what, row)) for row in asked.resolved]
    if all(why for _, why in reasons):
        raise BadInput(f"largest is {what}: {reasons[0][1]}")
    refused = [(str(row.recipe), why) for row, why in reasons if why and not asked.searched]
    rows = [row for row, why in reasons if not why]
    asked = dataclasses.replace(asked, resolved=rows, refused=[*asked.refused, *refused])
    told = list[Fit]()
    if asked.searched:
        told, proofs = asking.search(rows)
        best = [proof.best or proof.nearest for proof in proofs]
        rows = [fit.resolved for fit in best if fit] or rows[:1]
    size = search.ladder(what, rows[0]).named

    def ask(some: list[Resolved]) -> list[Fit]:
        return asking.fits(some, named=lambda row: f"{row.recipe} at {size(row)}")

    answers = search.search(rows, what, asked.gpu, ask, told)
    demand((fit for one in answers for fit in (one.fits, one.over)), asked.resolved, asked.gpu)
    print_largest(answers, what, asked, console)
    if options.json:
        found = {
            "gpu": dataclasses.asdict(asked.gpu),
            "assumed": verdict.assumed(asked.gpu),
            "rows": [{"recipe": one.recipe, "fits": _side_as_json(one.fits),
                      "over": _side_as_json(one.over), "exact": one.exact,
                      "stopped": one.stopped, "tried": one.tried} for one in answers],
            "refused": [{"recipe": name, "reason": reason} for name, reason in asked.refused],
        }  # fmt: skip
        write_answer(options, found)
    return OK


def _side_as_json(fit: Fit | None) -> dict[str, object] | None:
    if fit is None:
        return None
    sizes = {name: getattr(fit.resolved.spec, name) for name in ("resolution", "frames", "data")}
    return {**fit_as_json(fit), **sizes, "micro_batch": fit.resolved.micro_batch}


def plan_advice(options: argparse.Namespace, asking: Asking, console: Console) -> int:
    """Predict the recipe and each move from it, print the effects, and return the exit code."""
    (row,) = asking.asked.resolved
    moves = edits.moves(row, asking.asked.processes)
    given, *fits = asking.fits([row, *(move.row for move in moves)])
    demand([given], [row], given.gpu)
    moved = list(map(Moved, moves, fits))
    tried = asking.instead([given, *fits])
    print_advice(given, moved, advice_lines(given, moved, tried), console, whole=options.notes)
    if options.json:
        told = [{"knob": move.knob, "to": move.to, **fit_as_json(fit)} for move, fit in moved]
        others = [fit_as_json(fit) for fit in tried or ()]
        write_answer(options, {"given": fit_as_json(given), "moves": told, "tried": others})
    return OK

"""Further questions of ``plan``: ``--advise`` moves one knob at a time, and ``--largest`` searches
for the largest size that fits.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape

from harness.commands.console import OK
from harness.commands.options import write_answer
from harness.planner import edits, search, verdict
from harness.planner.edits import Move, Ways
from harness.planner.plan.answer import SAME, answer, gib, lacks, near, reach
from harness.planner.plan.candidates import Asked
from harness.planner.plan.request import fit_as_json
from harness.planner.plan.table import LOOKS, WORD, host, notes, setting, uncertain
from harness.planner.plan.tracing import Asking, demand
from harness.planner.search import SOUGHT, Largest
from harness.planner.verdict import Fit
from harness.report.data.grid import Grid, text_grid
from harness.report.figures.units import GIB
from harness.report.rendering.table import print_grid
from harness.resolve import Resolved

# ---- advice table ----


NAMED = 4
"""Number of moves that a sentence names."""
NOTE = (
    "Buys: GiB that the move saves of the recipe's need. Time: time of a sample relative "
    "to the recipe's, with typical figures."
)


Moved = Sequence[tuple[Move, Fit]]
"""Changes of one recipe, with their fits."""


def print_advice(given: Fit, moved: Moved, ways: Ways | None, console: Console) -> None:
    """Print the recipe, its moves by knob, and the conclusions."""
    console.print(setting([given]), highlight=False)
    console.print(f"From {escape(given.label)}: {escape(_state(given))}", highlight=False)
    kinds = {"Knob": "text", "Moved to": "text", "": "flag"}
    kinds |= dict.fromkeys(("Needs", "Buys", "Time"), "number")
    lines, last = [], ""
    for move, fit in moved:
        lines.append(_cells(move, fit, given, named=move.knob != last))
        last = move.knob
    print_grid(text_grid("advice", "", kinds, lines), console, least_worth=(), styles=LOOKS)
    for text in (NOTE, *notes([given])):
        console.print(text, style="dim", highlight=False)
    console.print()
    for line in advice_lines(given, moved, ways):
        console.print(escape(line), highlight=False)


def _state(fit: Fit) -> str:
    if fit.need_bytes is None:
        return f"{WORD[fit.verdict]}: {fit.lack or fit.prediction.reason}"
    if not fit.may_fit:
        return f"{WORD[fit.verdict]}, {lacks(fit)}"
    return f"{WORD[fit.verdict]}, needs {reach(fit)}"


def _cells(move: Move, fit: Fit, given: Fit, *, named: bool) -> list[str]:
    need = near(fit.need_bytes, fit.spread_bytes)
    cells = [move.knob if named else "", move.to, WORD[fit.verdict], need]
    return [*cells, gib(_buys(fit, given)), time_of(fit, given)]


def _buys(fit: Fit, given: Fit) -> int | None:
    known = fit.need_bytes is not None and given.need_bytes is not None
    return given.need_bytes - fit.need_bytes if known else None


def time_of(fit: Fit, given: Fit) -> str:
    """Return a sample's time relative to ``given``, as ``+30 %`` or ``x3.1``; ``-``: unknown."""
    if not fit.samples_per_second or not given.samples_per_second:
        return "-"
    times = given.samples_per_second / fit.samples_per_second
    if times >= 2:
        return f"x{times:.1f}"
    return "0 %" if abs(times - 1) < SAME else f"{100 * (times - 1):+.0f} %"


def advice_lines(given: Fit, moved: Moved, ways: Ways | None) -> list[str]:
    """Return the moves that make the recipe fit or faster."""
    fits = [(move, fit) for move, fit in moved if fit.fits]
    if given.need_bytes is None:
        return ["The recipe was not predicted, so no move can be compared with it."]
    if given.fits:
        faster = [pair for pair in fits if _faster(pair[1], given)]
        return _listed("It fits. Faster, and fits too", faster, given)
    if fits:
        return _listed("It begins to fit with one move", fits, given)
    return ["No single move makes it fit.", *answer([given], ways)]


def _faster(fit: Fit, given: Fit) -> bool:
    known = fit.samples_per_second and given.samples_per_second
    return bool(known) and fit.samples_per_second > (1 + SAME) * given.samples_per_second


def _listed(head: str, pairs: Sequence[tuple[Move, Fit]], given: Fit) -> list[str]:
    """Return up to ``NAMED`` of ``pairs``, one a line, the fastest first."""
    if not pairs:
        return [f"{head}: none of these moves."]
    quick = sorted(pairs, key=lambda pair: -(pair[1].samples_per_second or 0))[:NAMED]
    return [f"{head}, the fastest first:", *(f"  {_told(move, fit, given)}" for move, fit in quick)]


def _told(move: Move, fit: Fit, given: Fit) -> str:
    return f"{move.knob}: {move.to} ({gib(fit.need_bytes)} GiB, time {time_of(fit, given)})"


def _may(over: Fit) -> str:
    """Return the words for a size that may fit, or that lacks host memory alone; else empty."""
    if over.may_fit:
        return f"may fit: {reach(over)}"
    return lacks(over) if over.verdict == "host" else ""


# ---- largest table ----


def print_largest(answers: Sequence[Largest], what: str, asked: Asked, console: Console) -> None:
    """Print a line for each recipe: the largest size that fits, and the next that does not."""
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
    for told in answers:
        for line in _remarks(told, name):
            console.print(f"{escape(told.recipe)}: {escape(line)}", highlight=False)
    for recipe, reason in asked.refused:
        console.print(f"[yellow]refused[/yellow] {escape(recipe)}: {escape(reason)}")
    known = [fit for answer in answers for fit in (answer.fits, answer.over) if fit]
    told = [*uncertain(known), *(host(known[0]) if known else [])]
    for text in (*told, verdict.assumed(asked.gpu)):
        console.print(text, style="dim", highlight=False)
    text = "Every size in the table was predicted; none is interpolated."
    console.print(text, style="dim", highlight=False)


def _need(fit: Fit | None) -> str:
    """Return the need to a hundredth of a GiB, since neighbouring sizes differ by little."""
    return f"{fit.need_bytes / GIB:.2f} \u00b1{fit.spread_bytes / GIB:.1f}" if fit else "-"


def _how(fit: Fit) -> str:
    """Mark a size that may fit, or that only host memory is too small for."""
    return {"tight": " (tight)", "host": " (host short)"}.get(fit.verdict, "")


def _head(what: str, asked: Asked) -> str:
    row, card = max(asked.resolved, key=lambda r: r.spec.processes), asked.gpu
    size, processes = row.subject.size_in_words, row.spec.processes
    fixed = [row.spec.model]
    fixed += [] if what in ("resolution", "frames") else [f"at {size}"]
    batch = "" if what == "batch" else f", global batch {row.spec.global_batch}"
    return f"Largest {SOUGHT[what].words}: {' '.join(fixed)}{batch}, {processes} x {card.words}"


def _remarks(answer: Largest, name: Callable[[Resolved], str]) -> list[str]:
    """Return what qualifies the answer: an early stop, untested sizes, or tight fits."""
    remarks = [answer.stopped] if answer.stopped else []
    if answer.fits is None and answer.over is not None:
        remarks.append(f"not even {name(answer.over.resolved)} fits")
    if answer.fits is not None and not answer.exact and answer.over is not None:
        remarks.append(
            f"between {name(answer.fits.resolved)} and {name(answer.over.resolved)}, "
            f"after {answer.tried} predictions; sizes between them were not predicted"
        )
    if answer.fits is not None and answer.over is None and not answer.stopped:
        end = "the search ends there" if answer.exact else f"after {answer.tried} predictions"
        remarks.append(f"{name(answer.fits.resolved)} or more: {end}")
    over = answer.over
    if over is not None and (may := _may(over)):
        remarks.append(f"{name(over.resolved)} {may}")
    return remarks


# ---- largest size ----
# ``plan --largest`` inverts a plan, for each recipe that has such a size.


def plan_largest(options: argparse.Namespace, asking: Asking, console: Console) -> int:
    """Search for each recipe's largest size, print the answers, and return the exit code.

    Of a lattice, the recipes are the plan's answers, or what needs the least.

    Raises:
        BadInput: no recipe has such a size.
    """
    what, asked = options.largest, _able(options.largest, asking.asked)
    rows, told = asked.resolved, []
    if asked.searched:
        told, proofs = asking.search(rows)
        best = [proof.best or proof.nearest for proof in proofs]
        rows = [fit.resolved for fit in best if fit] or rows[:1]
    answers = asking.largest(what, rows, told=told)
    demand((fit for one in answers for fit in (one.fits, one.over)), asked.resolved, asked.gpu)
    print_largest(answers, what, asked, console)
    if options.json:
        write_answer(options, largest_as_json(answers, asked))
    return OK


def _able(what: str, asked: Asked) -> Asked:
    """Move rows without a largest ``what`` to the refused ones; those of a lattice are left out."""
    search.refuse(what, asked.resolved)
    reasons = [(row, search.unable(what, row)) for row in asked.resolved]
    refused = [(str(row.recipe), why) for row, why in reasons if why and not asked.searched]
    rows = [row for row, why in reasons if not why]
    return dataclasses.replace(asked, resolved=rows, refused=[*asked.refused, *refused])


def largest_as_json(answers: Sequence[Largest], asked: Asked) -> dict[str, object]:
    """Return each recipe's bracket: the size that fits and the one that does not."""
    refused = [{"recipe": name, "reason": reason} for name, reason in asked.refused]
    given = {"gpu": dataclasses.asdict(asked.gpu), "assumed": verdict.assumed(asked.gpu)}
    return {**given, "rows": [bracket_as_json(one) for one in answers], "refused": refused}


def bracket_as_json(one: Largest) -> dict[str, object]:
    """Return the bracket of one recipe."""
    return {**vars(one), "fits": _side_as_json(one.fits), "over": _side_as_json(one.over)}


def _side_as_json(fit: Fit | None) -> dict[str, object] | None:
    if fit is None:
        return None
    spec, sizes = fit.resolved.spec, ("model", "resolution", "frames", "data")
    return {
        **{name: getattr(spec, name) for name in sizes},
        "recipe": spec.recipe,
        "micro_batch": fit.resolved.micro_batch,
        "verdict": fit.verdict,
        "need_bytes": fit.need_bytes,
        "need_high_bytes": fit.most_bytes,
        "method": fit.prediction.method,
    }


def plan_advice(options: argparse.Namespace, asking: Asking, console: Console) -> int:
    """Predict the recipe and each move from it, print the effects, and return the exit code."""
    (row,) = asking.asked.resolved
    moves = edits.moves(row, asking.asked.processes)
    given, *fits = asking.fits([row, *(move.row for move in moves)])
    demand([given], [row], given.gpu)
    moved = list(zip(moves, fits, strict=True))
    ways = asking.ways([given, *fits])
    print_advice(given, moved, ways, console)
    if options.json:
        told = [{"knob": move.knob, "to": move.to, **fit_as_json(fit)} for move, fit in moved]
        tried = [fit_as_json(fit) for fit in ways.tried] if ways else []
        write_answer(options, {"given": fit_as_json(given), "moves": told, "tried": tried})
    return OK

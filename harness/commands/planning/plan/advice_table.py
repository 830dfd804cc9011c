"""``plan --advise`` in a terminal: a line a move, and where the recipe begins to fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from harness.commands.planning.plan.answer import answer, gib, lacks, near, reach
from harness.commands.planning.plan.table import LOOK, WORD, notes, setting
from harness.predict.advice import Advice, Move
from harness.predict.inverses import SOUGHT
from harness.predict.search import Largest
from harness.predict.verdict import Fit
from harness.predict.ways_out import Ways
from harness.report.data.grid import text_grid
from harness.report.rendering.narrow import print_grid

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["advice_lines", "print_advice"]

SAME = 0.005
"""Share of a sample's time below which two are told as equal."""
NAMED = 4
"""Moves that a sentence names."""
NOTE = (
    "Buys: GiB less than the recipe needs. Time: of a sample, against the recipe's, by typical "
    "figures."
)


def print_advice(found: Advice, ways: Ways | None, console: Console) -> None:
    """The recipe, its moves by knob, and what follows."""
    given = found.given
    console.print(setting([given]), highlight=False)
    console.print(f"From {escape(given.label)}: {escape(_state(given))}", highlight=False)
    kinds = {"Knob": "text", "Moved to": "text", "": "flag"}
    kinds |= dict.fromkeys(("Needs", "Buys", "Time"), "number")
    lines, last = [], ""
    for move, fit in found.moved:
        lines.append(_cells(move, fit, given, named=move.knob != last))
        last = move.knob
    looks = {"": {WORD[word]: look for word, look in LOOK.items()}}
    print_grid(text_grid("advice", "", kinds, lines), console, least_worth=(), styles=looks)
    for text in (NOTE, *notes([given])):
        console.print(text, style="dim", highlight=False)
    console.print()
    for line in advice_lines(found, ways):
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
    """A sample's time against the given recipe's: ``+30 %``, ``x3.1``; ``-`` where not known."""
    if not fit.samples_per_second or not given.samples_per_second:
        return "-"
    times = given.samples_per_second / fit.samples_per_second
    if times >= 2:
        return f"x{times:.1f}"
    return "0 %" if abs(times - 1) < SAME else f"{100 * (times - 1):+.0f} %"


def advice_lines(found: Advice, ways: Ways | None) -> list[str]:
    """Where it begins to fit, or what it could be given up for, and how far the scales go."""
    given, fits = found.given, [(move, fit) for move, fit in found.moved if fit.fits]
    lines = []
    if given.need_bytes is None:
        lines.append("Without a prediction of the recipe nothing can be held to it.")
    elif given.fits:
        faster = [pair for pair in fits if _faster(pair[1], given)]
        lines += _listed("It fits. Faster, and fits too", faster, given)
    elif fits:
        lines += _listed("It begins to fit with one move", fits, given)
    else:
        lines += ["No single move makes it fit.", *answer([given], ways)]
    lines += [_end(what, one) for what, one in found.largest.items()]
    return lines


def _faster(fit: Fit, given: Fit) -> bool:
    known = fit.samples_per_second and given.samples_per_second
    return bool(known) and fit.samples_per_second > (1 + SAME) * given.samples_per_second


def _listed(head: str, pairs: Sequence[tuple[Move, Fit]], given: Fit) -> list[str]:
    """The quickest of ``pairs``, one a line."""
    if not pairs:
        return [f"{head}: none of these moves."]
    quick = sorted(pairs, key=lambda pair: -(pair[1].samples_per_second or 0))[:NAMED]
    return [f"{head}, the fastest first:", *(f"  {_told(move, fit, given)}" for move, fit in quick)]


def _told(move: Move, fit: Fit, given: Fit) -> str:
    return f"{move.knob}: {move.to} ({gib(fit.need_bytes)} GiB, time {time_of(fit, given)})"


def _end(what: str, one: Largest) -> str:
    """How far a scale goes."""
    sought = SOUGHT[what]
    if one.fits is None:
        why = one.stopped or (f"not even {sought.named(one.over.resolved)}" if one.over else "none")
        return f"Largest {sought.words} that fits: {why}"
    size = sought.named(one.fits.resolved)
    if one.over is None:
        return f"Largest {sought.words} that fits: {size} or more"
    over = f"{sought.named(one.over.resolved)} does not, with {gib(one.over.need_bytes)} GiB"
    between = "" if one.exact else "; what lies between was not predicted"
    head = f"Largest {sought.words} that fits: {size} ({gib(one.fits.need_bytes)} GiB)"
    return f"{head}; {over}{between}"

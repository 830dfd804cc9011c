"""``plan --advise``: from one recipe, one knob moved at a time: what it buys, and what it costs."""

from __future__ import annotations

import argparse

from rich.console import Console

from harness.commands.console import OK
from harness.commands.planning.plan.advice_table import print_advice
from harness.commands.planning.plan.asking import Asking
from harness.commands.planning.plan.largest import side_as_json
from harness.commands.planning.plan.row_json import fit_as_json
from harness.json_files import write_json
from harness.predict import advice, inverses
from harness.predict.advice import Advice
from harness.predict.ways_out import Ways

__all__ = ["plan_advice"]


def plan_advice(options: argparse.Namespace, asking: Asking, console: Console) -> int:
    """Predict the recipe and every move from it, print what each does; the exit code."""
    (row,) = asking.asked.resolved
    moves = advice.moves(row, asking.asked.processes)
    given, *fits = asking.fits([row, *(move.row for move in moves)])
    # Without its own prediction there is nothing that a move could be held to.
    scales = advice.SCALES if given.need_bytes is not None else ()
    able = [what for what in scales if not inverses.unable(what, row)]
    largest = {
        what: asking.largest(what, [row], advice.TRIES, told=[given, *fits])[0] for what in able
    }
    found = Advice(given=given, moved=list(zip(moves, fits, strict=True)), largest=largest)
    ways = asking.ways([given, *fits])
    print_advice(found, ways, console)
    if options.json:
        write_json(options.json, as_json(found, ways))
    return OK


def as_json(found: Advice, ways: Ways | None) -> dict[str, object]:
    """The recipe, its moves, the largest sizes, and what was tried where no move fits."""
    return {
        "given": fit_as_json(found.given),
        "moves": [
            {"knob": move.knob, "to": move.to, **fit_as_json(fit)} for move, fit in found.moved
        ],
        "largest": {
            what: {**vars(one), "fits": side_as_json(one.fits), "over": side_as_json(one.over)}
            for what, one in found.largest.items()
        },
        "tried": [fit_as_json(fit) for fit in ways.tried] if ways else [],
    }

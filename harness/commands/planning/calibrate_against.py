"""``./run.sh calibrate --against DIR``: planned times beside measured ones, with and without the
calibration of the device that the results are of."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from harness.calibrate.against import as_json, held, table
from harness.calibrate.table import lines
from harness.calibration import store
from harness.commands.planning.plan.progress import PlanProgress
from harness.json_files import write_json
from harness.predict import attention, pool
from harness.predict.prediction import Prediction
from harness.predict.speed import calibrated, cards
from harness.predict.speed.cards import Card
from harness.resolve import resolve
from harness.result import Result, Status, load_all
from harness.spec import SpecError

__all__ = ["against"]


def against(options: argparse.Namespace, console: Console) -> int:
    """Predict every row of the results anew, and print the table; the exit code."""
    results = _results(options.against)
    card = _card(results[0])
    rows = held(results, _predictions(results, console))
    if options.json:
        write_json(options.json, as_json(rows))
    console.print(escape(lines(f"Against {options.against}", [table(rows, card)])), soft_wrap=True)
    console.print(escape(calibrated.words(card)), highlight=False)
    return 0


def _results(folder: Path) -> list[Result]:
    """Those that ended well and stand for what they say: no repetitions, no simulated worlds,
    and no rows of several machines, whose network no calibration has measured."""
    found = [
        result
        for result in load_all(folder)[0]
        if result.status is Status.OK
        and not result.spec.repeat
        and not result.spec.world
        and result.spec.nodes == 1
    ]
    if not found:
        raise SpecError(f"{folder}: no results in it; give a folder that ./run.sh run made")
    return found


def _card(result: Result) -> Card:
    """The device of the results, with the calibration that is kept for it."""
    facts = result.environment
    alike = [one for one in store.every() if calibrated.measured_on(facts, one.device)]
    found = store.choose(alike)
    if found is not None:
        card = calibrated.of_environment(facts, found.calibration)
        assert card is not None
        return card
    name = str(facts.get("device") or "")
    card = cards.named(name)
    if card is None and name == "cpu":
        card = cards.of_cpu(str(facts["cpu"]), int(facts["cores"]), int(facts["memory_bytes"]))
    if card is None:
        raise SpecError(f"{name} is not in the table of cards and was not calibrated; run "
                        "./run.sh calibrate there first")  # fmt: skip
    return card


def _predictions(results: Sequence[Result], console: Console) -> dict[str, Prediction]:
    rows = [resolve(result.spec) for result in results]
    kind = attention.taken(results[0].environment)
    progress = PlanProgress(console)
    progress.begin([str(row.recipe) for row in rows], pool.default_jobs())
    found = pool.predict_all(rows, pool.default_folder(), kind=kind, done=progress.done)
    progress.end()
    return {row.spec.key: prediction for row, prediction in zip(rows, found, strict=True)}

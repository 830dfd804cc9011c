"""Rows of an H100 and two H200 (docs/results/*.jsonl.xz), beside their predictions.

    python -m docs.make.gpu_rows    median and largest error of memory and of step times

Memory was predicted when the rows ran. Times follow from the recorded work and today's rates.
"""

from __future__ import annotations

import json
import lzma
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.json_files import build
from harness.planner.comparison import predicted_and_measured
from harness.planner.speed import roofline
from harness.prediction import Prediction
from harness.result import Result
from harness.system import cards

FOLDER = Path(__file__).parents[1] / "results"
SETS = {"h100-80gb": "H100-80GB", "h200-141gb": "H200-141GB"}
FIGURES = {"traced": "step", "allocated": "run", "reserved": "reserved"}
"""Name -> prefix of the fields of a pair."""
Pair = tuple[Result, Prediction]


def rows(name: str) -> Iterator[Pair]:
    """Yield the rows of a set, each with its prediction."""
    with lzma.open(FOLDER / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in lines:
            data: dict[str, Any] = json.loads(line)
            result = build(Result, data["result"], "row")
            yield result, build(Prediction, data["prediction"], "prediction")


def memory(some: list[Pair]) -> Iterator[tuple[str, list[float]]]:
    """Yield each figure of memory and the relative errors of its rows."""
    made = [predicted_and_measured([row], {row.spec.key: one}) for row, one in some]
    found = [pair for pair in made if pair is not None and pair.run_predicted]
    for name, field in FIGURES.items():
        pairs = [(getattr(p, f"{field}_predicted"), getattr(p, f"{field}_measured")) for p in found]
        yield name, [predicted / measured - 1 for predicted, measured in pairs if measured]


def times(some: list[Pair], card: cards.Card) -> tuple[list[float], int]:
    """Return the relative errors of step times, and how many the stated range covers."""
    errors, covered = [], 0
    for row, one in some:
        steps = [second for rank in row.ranks for second in rank.step_seconds]
        if not steps:
            continue
        told = roofline.seconds(one.work, card, row.spec.processes, row.spec.recipe)
        measured = statistics.median(steps)
        errors.append(told.total / measured - 1)
        covered += told.low <= measured <= told.high
    return errors, covered


def described(errors: list[float]) -> str:
    sizes = [abs(error) for error in errors]
    middle, largest = statistics.median(sizes), max(sizes)
    return f"{len(sizes)} rows, median error {middle:.2%}, largest {largest:.2%}"


if __name__ == "__main__":
    for name, card in SETS.items():
        some = list(rows(name))
        for figure, errors in memory(some):
            print(f"{name} {figure}: {described(errors)}")
        errors, covered = times(some, cards.find(card))
        if errors:
            print(f"{name} step time: {described(errors)}, {covered} covered")

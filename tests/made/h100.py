"""Rows of docs/results/h100-80gb and their predictions: the tables of docs/reference/h100.md.

``PYTHONPATH=. python -m tests.made.h100`` writes the tables anew, from the raw results. ``times``
behind it predicts the public step times on an H100, with typical figures, with the card's rates and
with the H200's attention (minutes), and prints their errors.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from harness import ROOT
from harness.planner import pool
from harness.planner.calibration.record import load
from harness.planner.calibration.store import Applied
from harness.planner.comparison import predicted_and_measured
from harness.planner.speed import rates
from harness.planner.verdict import judge
from harness.prediction import FILE, Prediction, kept
from harness.report.figures.predicted import PredictedAndMeasured
from harness.resolve import resolve, run_name
from harness.result import Result, load_all
from harness.system import cards
from harness.system.cards import Card
from tests.made import public_rows, published
from tests.made.pages import anew, line

FOLDER = ROOT / "docs/results/h100-80gb"
PAGE = ROOT / "docs/reference/h100.md"
H200 = ROOT / "docs/results/h200-141gb-calibration/calibration.json"
MIB = 2**20
HEAD = [
    "| model | recipe | traced | | allocated | predicted | off % | reserved | predicted | off % |",
    "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
]
SUMMARY = ["| figure | rows | median error | largest error |", "|---|--:|--:|--:|"]
FIGURES = {"traced": "step", "allocated": "run", "reserved": "reserved"}
"""Name on the page -> prefix of the fields of a pair."""
BESIDE = [
    "| rows | bare | prepared | in a step |",
    "|---|--:|--:|--:|",
]
PHASES = ("load", "prepare", "steady")


def rows(folder: Path = FOLDER) -> list[tuple[Result, Prediction]]:
    """Each row with its prediction, by model and recipe."""
    found = sorted(load_all(folder)[0], key=lambda r: (r.spec.model, r.spec.recipe))
    return [(row, _prediction(row, folder)) for row in found]


def _prediction(row: Result, folder: Path) -> Prediction:
    found = kept(folder / "runs" / run_name(row.spec) / FILE)
    assert found is not None, row.spec.recipe
    return found


def card(row: Result) -> Card | None:
    """Return the card that measured a row, without a calibration."""
    return rates.of_environment(row.environment, None)


def pairs(folder: Path = FOLDER) -> list[tuple[Result, PredictedAndMeasured]]:
    """Each predicted row with its figures."""
    made = [(row, predicted_and_measured([row], {row.spec.key: one})) for row, one in rows(folder)]
    return [(row, pair) for row, pair in made if pair is not None and pair.run_predicted]


def errors(figure: str, folder: Path = FOLDER) -> list[float]:
    """Return the relative errors of one of ``FIGURES``, without their signs."""
    name = FIGURES[figure]
    both = (
        (getattr(p, f"{name}_predicted"), getattr(p, f"{name}_measured")) for _, p in pairs(folder)
    )
    return [abs(predicted / measured - 1) for predicted, measured in both if measured]


def summary(folder: Path = FOLDER) -> Iterator[str]:
    """Yield the lines of the first table: how far each figure is off."""
    yield from SUMMARY
    for figure in FIGURES:
        found = [100 * error for error in errors(figure, folder)]
        ends = [f"{one:.2f} %" for one in (statistics.median(found), max(found))]
        yield line([figure, str(len(found)), *ends])


def table() -> Iterator[str]:
    """Yield the lines of the table: MiB of each row, and how far its predictions are off."""
    yield from HEAD
    for row, pair in pairs():
        traced = _off(pair.step_predicted, pair.step_measured)
        yield line(
            [
                row.spec.model,
                f"`{row.spec.recipe}`",
                _mib(pair.step_measured),
                traced,
                _mib(pair.run_measured),
                _mib(pair.run_predicted),
                _off(pair.run_predicted, pair.run_measured),
                _mib(pair.reserved_measured),
                _mib(pair.reserved_predicted),
                _off(pair.reserved_predicted, pair.reserved_measured),
            ]
        )


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / MIB:,.0f}"


def _off(predicted: int | None, measured: int | None) -> str:
    return f"{100 * (predicted / measured - 1):+.2f}" if predicted and measured else ""


def beside() -> Iterator[str]:
    """Yield the lines of the table of what a process holds beside torch's allocator, in MiB."""
    yield from BESIDE
    groups: dict[str, list[list[int]]] = {}
    for row, _ in rows():
        phases = row.ranks[0].phases
        if phases["steady"].process is not None:
            sizes = [phases[name].process - phases[name].reserved for name in PHASES]
            groups.setdefault(_kind(row), []).append(sizes)
    for kind, found in sorted(groups.items()):
        ends = [(min(column) / MIB, max(column) / MIB) for column in zip(*found, strict=True)]
        cells = [f"{a:.0f}" if round(a) == round(b) else f"{a:.0f} to {b:.0f}" for a, b in ends]
        yield line([f"{kind} ({len(found)})", *cells])


def _kind(row: Result) -> str:
    first = row.spec.recipe.partition("+")[0]
    if not first.startswith("zero"):
        return "one process without DeepSpeed"
    return "ZeRO-3" if first.startswith("zero3") else "ZeRO-1 and 2"


def times() -> None:
    """Print the errors of public step times on this card, by typical figures and by its rates."""
    usual = cards.find("H100-80GB")
    own = load(FOLDER / "calibration.json")
    longer = load(H200).ceilings.attention
    both = dataclasses.replace(own, ceilings=dataclasses.replace(own.ceilings, attention=longer))
    found_by = {"rates": own, "rates, attention of the H200": both}
    ways = {"typical": usual}
    for name, one in found_by.items():
        ways[name] = dataclasses.replace(usual, calibrated=Applied(calibration=one))
    found: dict[str, list[float]] = {name: [] for name in ways}
    rows = [r for r in public_rows.rows() if usual.name in r.get("seconds", {})]
    resolved = [resolve(published.spec_of(row)) for row in rows]
    made = pool.predict_all(resolved, pool.default_folder(), kind="cudnn")
    for row, one, prediction in zip(rows, resolved, made, strict=True):
        for name, gpu in ways.items():
            seconds = judge(one, prediction, gpu).seconds
            if seconds is not None:
                found[name].append(abs(seconds.total / row["seconds"][usual.name] - 1))
    for name, errors in found.items():
        middle, mean = statistics.median(errors), statistics.mean(errors)
        print(f"{name}: {len(errors)} times, median {middle:.1%}, mean {mean:.1%}")


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for made in (summary(), table(), beside()):
        page = anew(page, list(made))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    times() if sys.argv[1:] == ["times"] else main()

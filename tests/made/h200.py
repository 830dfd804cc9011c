"""Rows of docs/results/h200-141gb: measured step times, and their predictions by three ways.

``PYTHONPATH=. python -m tests.made.h200`` writes the tables of docs/reference/h200.md anew, from
the raw results. Predictions take the time model as it is; memory was predicted when the rows ran.
``streaming`` prints the share of the memory bandwidth that elementwise operations reached.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness import ROOT
from harness.planner.calibration.record import left_out_errors, load
from harness.planner.calibration.store import Applied
from harness.planner.speed import roofline
from harness.planner.speed.rates import rates as typical_rates
from harness.prediction import Prediction, Work
from harness.report.figures import derive
from harness.result import Result
from harness.system import cards
from tests.made import h100
from tests.made.pages import anew, line

FOLDER = ROOT / "docs/results/h200-141gb"
PAGE = ROOT / "docs/reference/h200.md"
CALIBRATION = ROOT / "docs/results/h200-141gb-calibration/calibration.json"
HEAD = [
    "| model | recipe | batch | ms | typical | off % | by rates | off % | left out, off % |",
    "|---|---|--:|--:|--:|--:|--:|--:|--:|",
]
SUMMARY = ["| predicted by | rows | median error | largest | covered |", "|---|--:|--:|--:|--:|"]
WAYS = ("typical figures", "rates of the card", "rates, fitted to the other rows")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A timed row: measured seconds, those predicted by typical figures and by the card's rates
    alone, and the relative error of a fit to the other rows."""

    row: Result
    seconds: float
    typical: roofline.Seconds
    rates: roofline.Seconds
    left_out: float
    share: float
    work: Sequence[Work]

    @property
    def model(self) -> str:
        return self.row.spec.model + (" (a quarter)" if self.row.spec.set else "")

    def errors(self) -> list[float]:
        """Return the relative errors of ``WAYS``."""
        pair = [one.total / self.seconds - 1 for one in (self.typical, self.rates)]
        return [*pair, self.left_out]

    def covered(self) -> list[bool]:
        """Return whether the measured time is in each range of ``WAYS``."""
        pair = [one.low <= self.seconds <= one.high for one in (self.typical, self.rates)]
        fitted = self.seconds * (1 + self.left_out)
        return [*pair, fitted / (1 + self.share) <= self.seconds <= fitted * (1 + self.share)]


def steps() -> list[Step]:
    """Each timed row in the order of the calibration's rows, by model, recipe and batch."""
    calibration = load(CALIBRATION)
    alone = dataclasses.replace(calibration, rows=[])
    usual = cards.find("H200-141GB")
    measured = dataclasses.replace(usual, calibrated=Applied(calibration=alone))
    share = max(Applied(calibration=calibration).fitted.shares.values())
    errors = left_out_errors(calibration.rows)
    known = {_key(row): error for row, error in zip(calibration.rows, errors, strict=True)}
    found = []
    for row, prediction in h100.rows(FOLDER):
        if not derive.step_seconds(row) or row.beside:
            continue
        seconds = derive.quantile(derive.step_seconds(row), 0.5)
        typical, rates = (_seconds(row, prediction, card) for card in (usual, measured))
        left = known[row.spec.model, row.spec.recipe, row.spec.global_batch, round(1e6 * seconds)]
        ways = {"typical": typical, "rates": rates, "left_out": left, "share": share}
        found.append(Step(row=row, seconds=seconds, work=prediction.work, **ways))
    return sorted(found, key=lambda one: (one.model, one.row.spec.recipe, one.seconds))


def _key(row) -> tuple[str, str, int, int]:
    return row.model, row.recipe, row.global_batch, round(1e6 * row.step_seconds)


def _seconds(row: Result, prediction: Prediction, card: cards.Card) -> roofline.Seconds:
    return roofline.seconds(prediction.work, card, row.spec.processes, row.spec.recipe)


def summary(found: Sequence[Step]) -> Iterator[str]:
    """Yield the lines of the table of errors of time."""
    yield from SUMMARY
    for place, name in enumerate(WAYS):
        errors = [100 * abs(one.errors()[place]) for one in found]
        within = sum(one.covered()[place] for one in found)
        ends = [f"{one:.0f} %" for one in (statistics.median(errors), max(errors))]
        yield line([name, str(len(found)), *ends, str(within)])


def table(found: Sequence[Step]) -> Iterator[str]:
    """Yield the lines of the table of step times."""
    yield from HEAD
    for one in found:
        spec, errors = one.row.spec, [f"{100 * error:+.0f}" for error in one.errors()]
        typical, rates = one.typical.words, f"{1e3 * one.rates.total:.0f}"
        cells = [one.model, f"`{spec.recipe}`", str(spec.global_batch), f"{1e3 * one.seconds:.0f}"]
        yield line([*cells, typical, errors[0], rates, errors[1], errors[2]])


WIDTHS = {"flux-dev": 128, "sd3.5-medium": 64, "DiT-XL/2": 72}
"""Model -> width of its heads."""


def streaming(found: Sequence[Step]) -> Iterator[tuple[Step, float]]:
    """Yield each row that the card decides, and the share of the memory bandwidth in it.

    It is what elementwise operations and reductions reach if products go at their typical rates,
    attentions as the card's kernel was measured, and operations that are too small for the
    bandwidth take a launch each. Together they take the whole step.
    """
    usual, measured = cards.find("H200-141GB"), load(CALIBRATION).ceilings.attention
    for one in found:
        spec = one.row.spec
        if one.typical.overhead or one.typical.offload > 0.01 * one.seconds:
            continue
        kernel = "flash" if "kernel=flash" in spec.recipe else "cudnn"
        own = [a for a in measured if a.width == WIDTHS[spec.model]]
        known: dict[str, list[tuple[int, float]]] = {
            dtype: sorted((a.tokens, a.rate) for a in own if (a.kernel, a.dtype) == (of, dtype))
            for dtype, of in (("bfloat16", kernel), ("float32", "efficient"))
        }
        rates = dataclasses.replace(typical_rates(usual, 1), kernels=known)
        fused = [w for w in one.work if w.kind in ("product", "attention")]
        tf32 = roofline.in_tf32(spec.recipe)
        left = one.seconds - roofline.parts_of(fused, rates, 1, tf32)["compute"]
        moving = [w for w in one.work if w.kind == "memory"]
        small = [w for w in moving if w.bytes < rates.launch * usual.bandwidth / 2]
        left -= rates.launch * sum(w.count for w in small)
        moved = sum(w.count * w.bytes for w in moving if w not in small)
        yield one, moved / left / usual.bandwidth


def main(what: Sequence[str] = ()) -> None:
    if "streaming" in what:
        for one, share in streaming(steps()):
            print(f"{share:.2f}  {one.model} {one.row.spec.recipe}, {one.row.spec.global_batch}")
        return
    page, found = PAGE.read_text(encoding="utf-8"), steps()
    for made in (summary(found), table(found), h100.summary(FOLDER)):
        page = anew(page, list(made))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

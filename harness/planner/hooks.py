"""Hooks of the planner in the commands ``run``, ``doctor`` and ``anatomy``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness import RUN
from harness.commands.console import INTERRUPTED
from harness.commands.progress import Predictions, during
from harness.memory.memory_breakdown import MemoryBreakdown
from harness.planner import overhead, pool
from harness.planner.calibration.record import Ceilings
from harness.planner.speed import rates
from harness.prediction import FILE, Prediction, kept
from harness.report import write_report
from harness.report.figures.predicted import OUT_OF_MEMORY
from harness.resolve import Resolved, run_name
from harness.result import Result, Status
from harness.spec import Spec


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option of ``run``."""
    text = "do not predict the measured rows"
    parser.add_argument("--no-predictions", action="store_true", help=text)


def after_run(
    results: Sequence[Result],
    rows: Sequence[Resolved],
    options: argparse.Namespace,
    out: Path,
    console: Console,
    code: int | None,
) -> int | None:
    """Write the device's calibration beside the results, and predict what was measured.
    Nothing is predicted if ``code``, the exit code, is decided already. Return the exit code if it
    is decided."""
    devices = filter(None, (result.environment.get("device") for result in results))
    rates.keep_beside(out, next(devices, ""))
    if code is not None or not results or options.no_predictions:
        return code
    # Predictions take minutes and may be interrupted, so the report is written before them.
    write_report(results, [], out, lost=[])
    return None if predict_measured(results, rows, out, console) else INTERRUPTED


def predict_measured(
    results: Sequence[Result], rows: Sequence[Resolved], out: Path, console: Console
) -> bool:
    """Predict what each measured row needs, and store the prediction beside its result.
    Rows that ran out of memory are predicted too, to check whether the prediction says so.
    Predictions follow all runs, so they disturb no measurement, and their failure does not fail the
    command. Return False if the user interrupts them."""
    done = [r for r in results if r.status in (Status.OK, *OUT_OF_MEMORY)]
    of_spec = {row.spec: row for row in rows}
    once = {dataclasses.replace(r.spec, repeat=0): r.spec for r in reversed(done)}.values()
    wanted = [r.spec for r in done if r.spec in once]  # repetitions share one prediction
    # The rows ran on one machine, so any environment that names its attention backend serves. A row
    # that died early recorded none.
    environment = next((r.environment for r in done if "attention" in r.environment), {})
    kind, folder = overhead.taken(environment), out / "predictions"

    def current(spec: Spec) -> bool:
        """Return True if there is a prediction; a trace of other code has another cached name."""
        found = kept(_prediction_file(spec, out))
        traced = found is not None and found.method == "trace"
        return pool.cached(of_spec[spec], folder, kind) is not None if traced else bool(found)

    missing = [of_spec[spec] for spec in wanted if not current(spec)]
    if not missing:
        return True
    progress = Predictions(console)

    def keep(index: int, prediction: Prediction) -> None:
        with contextlib.suppress(OSError):
            prediction.write(_prediction_file(missing[index].spec, out))
        progress.done(index, prediction)

    try:
        with during(progress, [str(row.recipe) for row in missing]):
            pool.predict_all(missing, folder, kind=kind, done=keep)
    except KeyboardInterrupt:
        return False  # the report can still be made from the results
    return True


def _prediction_file(spec: Spec, out: Path) -> Path:
    return out / "runs" / run_name(spec) / FILE


def calibration_words(device: str) -> str:
    """Return the calibration that predictions for a device use, by a worker's name for it."""
    found = rates.kept_for(device)
    none = f"none; {RUN} calibrate measures the rates that predictions assume"
    return found.words if found else none


def under_ceilings(breakdown: MemoryBreakdown) -> MemoryBreakdown:
    """Return ``breakdown`` with the ceilings of its device's calibration, if there is one.
    The calibration measures more shapes for longer than a run does. CPU processes share its
    ceilings."""
    found = rates.kept_for(breakdown.device)
    ceilings = found.calibration.ceilings if found else Ceilings()
    flops, streams = ceilings.products.get(breakdown.dtype), ceilings.streams
    if not flops or not streams:
        return breakdown
    share = breakdown.processes if breakdown.device == "cpu" else 1
    largest = max(streams, key=lambda stream: stream.bytes)
    return dataclasses.replace(
        breakdown, peak_flops=flops / share, bandwidth=largest.rate / share, ceilings=found.words
    )

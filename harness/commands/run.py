"""What the commands do. ``harness.cli`` parses; each function here returns an exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from harness import launch, matrix, suite_file, suite_run
from harness.doctor import needed_ops, print_doctor
from harness.machine import Machine, examine, recall
from harness.options import add_settings, seconds
from harness.plan_text import PlanProgress
from harness.predict import attention, pool
from harness.predict.prediction import Prediction
from harness.predict.prediction import load as load_prediction
from harness.progress import Progress, make_console
from harness.report import compare as compare_folders
from harness.report import derive, print_report, read_suite, write_report
from harness.report.fit_verdicts import OUT_OF_MEMORY
from harness.report.predicted import FILE
from harness.resolve import Resolved, project_root, resolve, run_name
from harness.result import Result, Status, load_all
from harness.spec import Spec, SpecError
from harness.suite_file import Suite
from harness.suite_run import Planned

__all__ = [
    "add_arguments",
    "compare",
    "doctor",
    "examined",
    "exit_code",
    "report",
    "run",
    "short",
    "slug",
]

OK, FAILED, INTERRUPTED = 0, 1, 130
FAILURES = {Status.FAILED, Status.VOID, Status.TIMEOUT, Status.HOST_OOM, Status.GPU_OOM}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``run``."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--suite", metavar="NAME_OR_FILE", help="see ./run.sh list (default: default)"
    )
    what.add_argument(
        "--recipes", nargs="+", metavar="R", help="recipes; the first is the reference"
    )
    add = parser.add_argument
    add("--repeat", type=int, metavar="N", help="measure every recipe N times")
    add("--timeout", type=seconds, metavar="SECONDS", help="deadline of one run (default: suite's)")
    add("--out", type=Path, metavar="DIR", help="results folder (default: results/SUITE)")
    add("--fresh", action="store_true", help="repeat finished runs too")
    add("--no-predictions", action="store_true", help="do not predict what was measured")
    add("--dry-run", action="store_true", help="print the commands, start nothing")
    settings = parser.add_argument_group("settings of every row (they win over the suite's)")
    add_settings(settings, "recipe", "repeat")


def run(options: argparse.Namespace, given: Mapping[str, Any]) -> int:
    """Run a suite, print its table, name the report's files."""
    console = make_console()
    name = "recipes" if options.recipes else options.suite or "default"
    out = Path(options.out or project_root() / "results" / slug(name)).absolute()
    machine = recall(out)
    suite, planned = _plan(options, given, out, machine)
    if options.dry_run:
        return _dry_run(planned, machine)
    _enough_gpus(given, planned)
    suite_run.check_out(out)
    runnable = [row.resolved for row in planned if not row.resolved.refusal]
    machine = examined(console, out, needed_ops(runnable))
    suite, planned = _plan(options, given, out, machine)
    specs, code = [row.resolved.spec for row in planned], None
    try:
        results = suite_run.run_suite(
            suite,
            specs,
            out,
            machine=machine,
            progress=Progress(console),
            fresh=options.fresh,
            timeout=options.timeout,
        )
    except suite_run.Interrupted as stop:
        results, code = stop.results, INTERRUPTED
    if code is None and not options.no_predictions:
        _predict(results, out, console)
    _show(results, load_all(out)[1], out, console)
    if code == INTERRUPTED:
        console.print(
            f"interrupted after {ended(results)} of {len(specs)} rows; the same command resumes"
        )
    return exit_code(results) if code is None else code


def exit_code(results: Sequence[Result]) -> int:
    """0 if all rows that could run are ok, else 1."""
    ends = {derive.effective_status(result)[0] for result in results}
    return FAILED if ends & FAILURES else OK


def ended(results: Sequence[Result]) -> int:
    """Rows that were not cut short."""
    return sum(result.status is not Status.INTERRUPTED for result in results)


def slug(name: str) -> str:
    """A suite's name or file as the name of a folder."""
    return re.sub(r"[^\w.-]+", "_", Path(name).stem if Path(name).is_file() else name)


def _plan(
    options: argparse.Namespace, given: Mapping[str, Any], out: Path, machine: Machine
) -> tuple[Suite, list[Planned]]:
    """The suite, and every row checked: bad input ends here, before any process starts."""
    device = options.device or machine.device
    if device == "cuda" and not machine.gpus and not options.dry_run:
        raise SpecError("device is cuda, and no GPU is to be seen here; use --device cpu")
    if options.recipes:
        suite = matrix.ad_hoc(options.recipes, device)
    else:
        suite = suite_file.load_suite(options.suite or "default", device)
    specs = matrix.specs(suite, given, gpus=len(machine.gpus), gpu_bytes=machine.smallest_gpu_bytes)
    return suite, suite_run.plan(specs, out, machine)


def _enough_gpus(given: Mapping[str, Any], planned: Sequence[Planned]) -> None:
    """Too few GPUs for an explicit --processes is a slip of the hand, not a property of rows."""
    for row in planned:
        if "processes" in given and row.lack and "as many GPUs" in row.lack.reason:
            raise SpecError(f"{row.lack.reason}; {row.lack.way_out}")


def examined(console: Console, out: Path, ops: set[str]) -> Machine:
    """The machine as torch and DeepSpeed see it, with ``ops`` compiled."""
    with _waiting(console, "checking the machine (the first time DeepSpeed compiles its ops)"):
        return examine(out, ops)


@contextlib.contextmanager
def _waiting(console: Console, text: str) -> Iterator[None]:
    if not console.is_terminal:
        console.print(text)
        yield
        return
    with console.status(text):
        yield


def _dry_run(planned: Sequence[Planned], machine: Machine) -> int:
    """The command of each row, as a line for a shell; a comment line says why one will not run."""
    if machine.probe is None:
        print("# ops and backends were not probed yet; ./run.sh doctor does")
    for index, row in enumerate(planned, 1):
        print(f"# {index}/{len(planned)} {row.resolved.recipe}" + _why_not(row))
        prefix = "# " if row.status else ""
        print(prefix + launch.display(row.resolved.spec, row.folder))
    return OK


def _why_not(row: Planned) -> str:
    if row.status is None:
        return "".join(f" ({note})" for note in row.notes)
    return f": {row.status.value}: {row.lack.reason} -> {row.lack.way_out}"


def _show(results: Sequence[Result], skipped: Sequence[str], out: Path, console: Console) -> None:
    if not results:
        return
    paths = write_report(results, skipped, out)
    console.print()
    print_report(results, skipped, console, suite=read_suite(out), folder=out)
    console.print()
    for path in paths:
        console.print(Text(str(short(path))), soft_wrap=True)


def short(path: Path) -> Path:
    """``path`` as seen from the working directory, where it lies below it."""
    with contextlib.suppress(ValueError):
        return path.relative_to(Path.cwd())
    return path


def _predict(results: Sequence[Result], out: Path, console: Console) -> None:
    """What each measured row would have been predicted to need, kept beside its result.

    And rows that ran out of memory: were they predicted to? After the runs, so that it disturbs
    no measurement; it never fails one.
    """
    done = [r for r in results if r.status in (Status.OK, *OUT_OF_MEMORY)]
    resolved = [resolve(r.spec) for r in done]
    rows = [row for row in resolved if not load_prediction(_prediction_file(row, out))]
    if not rows:
        return
    # Alike in all that tell, by their identity; a row that died early tells nothing.
    told = next((r.environment for r in done if "attention" in r.environment), {})
    kind = attention.taken(told)
    progress = PlanProgress(console)
    progress.begin([str(row.recipe) for row in rows], pool.default_jobs())

    def keep(index: int, found: Prediction) -> None:
        with contextlib.suppress(OSError):
            found.write(_prediction_file(rows[index], out))
        progress.done(index, found)

    with contextlib.suppress(KeyboardInterrupt):  # the results are there: report on them
        pool.predict_all(rows, out / "predictions", kind=kind, done=keep)


def _prediction_file(row: Resolved, out: Path) -> Path:
    return out / "runs" / run_name(row.spec) / FILE


# ---- the other commands ----


def report(folder: Path) -> int:
    """Make the report of a results folder again."""
    results, skipped = _results(folder)
    _show(results, skipped, folder, make_console())
    return OK


def _results(folder: Path) -> tuple[list[Result], list[str]]:
    if not folder.is_dir():
        raise SpecError(f"{folder}: no such folder; give one that ./run.sh run made (--out)")
    results, skipped = load_all(folder)
    if not results:
        first = f"; {skipped[0]}" if skipped else "; it should hold runs/*/result.json"
        raise SpecError(f"{folder}: no results in it{first}")
    return results, skipped


def compare(old: Path, new: Path) -> int:
    """What changed between two results folders."""
    for folder in (old, new):
        _results(folder)
    compare_folders(old, new).print(make_console())
    return OK


def doctor(out: Path) -> int:
    """What this machine can run, with its results in ``out``."""
    console, there = make_console(), next(p for p in (out, *out.absolute().parents) if p.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise SpecError(f"{out}: {there} is no folder to write to; choose another --out")
    ops = needed_ops([resolve(Spec(recipe="zero3_nvme", device=recall(out).device))])
    print_doctor(examined(console, out, ops), console)
    return OK

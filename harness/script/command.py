"""``./run.sh script``: measure a user's script under several launch files, and report."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from harness import RESULTS
from harness.commands.console import (
    FAILED,
    OK,
    examined,
    exit_code,
    looked,
    make_console,
    short,
    slug,
)
from harness.commands.options import add_force, folder_name, seconds
from harness.commands.progress import Waiting
from harness.commands.reports import show
from harness.commands.run import run_rows
from harness.launch import launch
from harness.phases import SETUP_PHASES
from harness.report.figures.units import CATEGORIES, GIB, title
from harness.result import Result, Status, load_all
from harness.script.row import CLIPPING, REFERENCES, Script, ScriptRow, recipes_of, row_of
from harness.spec import DEVICES
from harness.suite.file import Suite, SuiteRow
from harness.suite.rows import with_reference_again
from harness.suite.run import check_out, plan
from harness.system.machine import Machine
from harness.system.requirements import needed_ops

TIMEOUT_SECONDS = 1800.0
LAUNCHES = ("ddp", "zero2", "zero3", "fsdp2")
"""Default launch files on several processes."""
RUNS_OF_REFERENCE = 2
"""Two runs of the reference show whether a script's losses can be compared."""
NEVER_BACKWARD = (
    "the script prepared its model and never called accelerator.backward(loss); call it "
    "instead of loss.backward(), or give a longer --timeout"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``script``."""
    add = parser.add_argument
    text = "names in launch_configs/, or paths of accelerate's files or DeepSpeed JSONs of yours "
    text += f"(default: {' '.join(LAUNCHES)}; single on one process)"
    add("--launch", nargs="+", metavar="NAME_OR_FILE", help=text)
    text = "strategies to add to each launch file, such as checkpoint adam8bit (default: none)"
    add("--with", nargs="+", metavar="STRATEGY", dest="added", default=[], help=text)
    text = "take two steps on one process, and print the recognised model, optimizer and settings"
    add("--check", action="store_true", help=text)
    add("--processes", type=int, metavar="N", help="processes (default: all GPUs, else 1)")
    add("--device", choices=DEVICES, help="cpu or cuda (default: cuda if there)")
    add("--warmup", type=int, metavar="W", default=2, help="first optimizer steps (default: 2)")
    add("--steps", type=int, metavar="N", default=8, help="timed optimizer steps (default: 8)")
    text = "seed set before the script, whose own seed wins (default: 0)"
    add("--seed", type=int, metavar="S", default=0, help=text)
    text = "limit of the gradient norm that the script applies (default: read from a run)"
    add("--clip", type=float, metavar="NORM", help=text)
    text = f"deadline of one run (default: {TIMEOUT_SECONDS:g})"
    add("--timeout", type=seconds, metavar="SECONDS", default=TIMEOUT_SECONDS, help=text)
    text = "deadline for loading and preparing, before the first step (default: --timeout)"
    add("--load-timeout", type=seconds, metavar="SECONDS", help=text)
    text = "results folder (default: results/script-NAME)"
    add("--out", type=folder_name, metavar="DIR", help=text)
    add_force(parser)
    add("--fresh", action="store_true", help="repeat finished runs too (default: keep them)")
    add("--dry-run", action="store_true", help="print the commands, start nothing")
    text = "-- train.py ARGUMENTS: your training script (required; no default)"
    add("script", nargs=argparse.REMAINDER, help=text)


def act(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    console = make_console()
    script = Script.of(options.script, Path.cwd())
    out = Path(options.out or RESULTS / f"script-{slug(script.path.stem)}").absolute()
    machine = looked(console, out, options.device, dry=options.dry_run)
    device = options.device or machine.device
    if options.check:
        return _check(script, device, out, options, console)
    rows = _rows(script, device, machine, options)
    if options.dry_run:
        for row in plan(rows, out, machine):
            text = launch.display(row.resolved, row.folder)
            if row.status and row.lack:
                text = f"# {row.status.value}: {row.lack.text} -> {row.lack.hint}"
            print(text)
        return OK
    check_out(out, force=options.force)
    machine = examined(console, out, needed_ops([row for row in rows if not row.refusal]))
    results, code = _measured(rows, device, out, machine, options, console)
    show(results, load_all(out)[1], out, console)
    return exit_code(results) if code is None else code


def _rows(
    script: Script, device: str, machine: Machine, options: argparse.Namespace
) -> list[ScriptRow]:
    """Return the rows to run, the reference first and again.

    Raises:
        BadInput: an unknown launch file or strategy.
    """
    gpus = len(machine.gpus) if device == "cuda" else 0
    processes = options.processes if options.processes is not None else max(1, gpus)
    launches = options.launch or (LAUNCHES if processes > 1 else REFERENCES[:1])
    fields = {"device": device, "processes": processes, "seed": options.seed}
    fields |= {"warmup": options.warmup, "steps": options.steps}
    recipes = recipes_of(launches, options.added, processes)
    rows = [row_of(script, recipe, clip=options.clip, **fields) for recipe in recipes]
    known = {row.spec: row for row in rows}
    specs = with_reference_again(list(known), recipes[0], RUNS_OF_REFERENCE)
    return [
        dataclasses.replace(known[dataclasses.replace(spec, repeat=0)], spec=spec) for spec in specs
    ]


def _measured(
    rows: Sequence[ScriptRow],
    device: str,
    out: Path,
    machine: Machine,
    options: argparse.Namespace,
    console: Console,
) -> tuple[list[Result], int | None]:
    """Run the rows; return their results, and the exit code if it is decided already."""
    suite = Suite(
        path=out,
        name=f"script {rows[0].script.path.name}",
        title=rows[0].script.text,
        reference=rows[0].spec.recipe,
        timeout_seconds=options.timeout,
        device=device,
        settings={},
        rows=tuple(SuiteRow(recipe=row.spec.recipe) for row in rows),
    )
    starter = Starter(out, options.load_timeout or options.timeout)
    planned = plan(rows, out, machine)
    return run_rows(suite, planned, out, options, console, machine=machine, start=starter)


# ---- one run ----


class Starter:
    """Starts rows as ``launch.run`` does, with what earlier rows have shown of the script.

    Args:
        out: the suite's folder, whose finished rows may be of an earlier command.
        load_limit: seconds until the first step.
    """

    def __init__(self, out: Path, load_limit: float) -> None:
        self.out, self.load_limit = out, load_limit

    def __call__(
        self, row: ScriptRow, folder: Path, *, timeout: float, on_status: Callable[..., None]
    ) -> Result:
        """Run ``row`` in ``folder``; a row that clips otherwise than the script runs once more."""
        if row.clip is None and "own_clipping" in row.launch.traits:
            # The limit that another row of the same script recorded.
            others = [r for r in load_all(self.out)[0] if r.spec.model == row.spec.model]
            limits = (clip for clip in map(clip_of, others) if clip is not None)
            row = dataclasses.replace(row, clip=next(limits, None))
        for _ in range(2):
            began = time.monotonic()

            def stop(began: float = began) -> str | None:
                """End a run in which no rank has begun a step."""
                if time.monotonic() - began < self.load_limit:
                    return None
                phases = [status.get("phase") for status in launch.rank_files(folder, "status")]
                return "timeout" if all(phase in SETUP_PHASES for phase in phases) else None

            result = launch.run(row, folder, timeout=timeout, on_status=on_status, stop=stop)
            clip = clip_of(result)
            if clip is None or all(c.ok for c in result.audit if c.name == CLIPPING):
                break
            row = dataclasses.replace(row, clip=clip)
        return _advised(result, self.load_limit)


def clip_of(result: Result) -> float | None:
    """Return the limit of the gradient norm that a row's script applied; None if unknown."""
    clip = (result.evidence.get("script") or {}).get("clip")
    return None if clip is None else float(clip)


def _advised(result: Result, load_limit: float) -> Result:
    """Return the row of a run that timed out before its first step, with advice for its author."""
    before = result.phase in SETUP_PHASES or (result.phase == "warmup" and not result.step)
    if result.status is not Status.TIMEOUT or not before:
        return result
    if result.phase != "warmup":
        result.reason = f"no optimizer step after {load_limit:g} s: stopped in phase {result.phase}"
    loads = "give a longer --load-timeout and --timeout if the script loads so long"
    result.way_out = NEVER_BACKWARD if result.phase in ("prepare", "warmup") else loads
    return result


# ---- check ----


def _check(
    script: Script, device: str, out: Path, options: argparse.Namespace, console: Console
) -> int:
    """Take two steps on one process, and print what was recognised; return the exit code."""
    row = row_of(
        script, "single", check=True, device=device, processes=1, warmup=1, steps=1,
        seed=options.seed,
    )  # fmt: skip
    folder = out / "check"
    if options.dry_run:
        print(launch.display(row, folder))
        return OK
    check_out(out, (folder.name,), force=options.force)
    starter = Starter(out, options.load_timeout or options.timeout)
    with Waiting(console, "two steps of the script") as line:
        result = starter(row, folder, timeout=options.timeout, on_status=line.status)
    for line in _seen(result):
        console.print(Text(line), soft_wrap=True)
    if result.status is Status.OK:
        return OK
    console.print(Text(f"{result.status.value}: {result.reason}"), soft_wrap=True)
    console.print(Text(f"-> {result.way_out}; log: {short(folder / 'log.txt')}"), soft_wrap=True)
    if result.log_tail:
        console.print(Text(result.log_tail, style="dim"), soft_wrap=True)
    return FAILED


def _seen(result: Result) -> Iterator[str]:
    """Yield lines on what a run recognised of the script."""
    facts = result.evidence.get("script") or {}
    if not facts:
        return
    types = result.evidence.get("precision") or {}
    count, trained = facts["parameters"], facts["trained_parameters"]
    share = 100 * trained / count if count else 0.0
    yield f"model       {', '.join(facts['models'])}, {facts['blocks']} blocks"
    yield f"parameters  {count:,}, of which {trained:,} train ({share:.2f} %)"
    yield f"optimizer   {', '.join(facts['optimizers'])}"
    kinds = ", ".join(f"{name.replace('_', ' ')} {kind}" for name, kind in types.items() if kind)
    yield f"precision   mixed_precision {facts['mixed_precision']}; {kinds}"
    batch = facts["batch_of_all_ranks"] or "unknown"
    yield f"batch       {batch}, accumulation {facts['accumulation']}"
    clip = facts["clip"]
    yield f"clipping    {'none' if clip is None else f'{clip:g}'}"
    skipped = ", ".join(f"{name} x{n}" for name, n in facts["skipped"].items())
    yield f"left out    {skipped or 'nothing'}"
    for rank in result.ranks[:1]:
        for owner, size in rank.resident.items():
            yield f"resident    {owner} {size / GIB:.3f} GiB"
        if rank.categories is not None:
            for name in (*CATEGORIES, "resident"):
                size = getattr(rank.categories, name)
                yield f"memory      {title(name):<16} {size / GIB:9.3f} GiB"
            total, phase = rank.categories.total / GIB, rank.categories.phase
            yield f"memory      peak {total:.3f} GiB, in {phase}"
    yield from (f"note        {note}" for note in result.meter_notes)

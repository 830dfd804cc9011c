"""``run --on slurm``: one job a suite, shown before it is submitted, followed and found again."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from harness import ROOT
from harness.commands.console import INTERRUPTED, OK, exit_code, short
from harness.commands.reports import show
from harness.nodes import job as jobs
from harness.nodes import slurm
from harness.nodes.place import supervisor_words
from harness.result import load_all
from harness.spec import SpecError
from harness.suite.run import check_out

__all__ = ["add_arguments", "run", "typed"]

OWN = ("on", "site", "time", "dry_run", "parser", "act", "help", "node_rank", "head")
"""Options that are of the submission and not of the job."""
EXPORTS = ("HEADROOM_PYTHON", "HEADROOM_VENV", "HEADROOM_SCRATCH", "HEADROOM_INTERFACE")


def add_arguments(group: Any) -> None:
    """The options of a submission."""
    told = "submit the suite as one job, with a step a row, and follow it (default: run here)"
    group.add_argument("--on", choices=("slurm",), help=told)
    told = "your site's #SBATCH and shell lines, put into the job's script (default: none)"
    group.add_argument("--site", type=Path, metavar="FILE", help=told)
    told = "the job's time limit, as Slurm takes it: 4:00:00 (default: the partition's)"
    group.add_argument("--time", metavar="T", help=told)


def run(options: argparse.Namespace, out: Path, name: str, console: Console) -> int:
    """Show, submit or find the suite's job, and follow it; the exit code."""
    text = _script(options, out, name)
    if options.dry_run:
        return _show(text, options)
    check_out(out)
    job = jobs.Job.of(out)
    if job:
        console.print(f"job {job.number} runs for {short(out)} already: following it")
    else:
        job = jobs.submit(text, out)
        console.print(Text(f"job {job.number}: {short(out / 'suite.sbatch')}"), soft_wrap=True)
    try:
        job.follow(console.print, _pass_on)
    except KeyboardInterrupt:
        return _left(job, out, console)
    return _over(job, out, console)


def _script(options: argparse.Namespace, out: Path, name: str) -> str:
    nodes = options.nodes or 1
    if nodes < 1:
        raise SpecError(f"nodes is {nodes}; give --nodes at least 1")
    site = slurm.read_site(options.site) if options.site else slurm.Site()
    words = [str(ROOT / "run.sh"), "run", *typed(options), "--out", str(out)]
    return slurm.script(
        site,
        words,
        name=f"headroom-{name}",
        nodes=nodes,
        time=options.time,
        folder=out,
        where=Path.cwd(),
        exports={key: os.environ[key] for key in EXPORTS if os.environ.get(key)},
    )


def typed(options: argparse.Namespace) -> list[str]:
    """The options as they were typed, but for those of the submission and the folder."""
    words: list[str] = []
    for action in options.parser._actions:
        value = getattr(options, action.dest, None)
        if action.dest in (*OWN, "out") or value == action.default or value is None:
            continue
        flag = max(action.option_strings, key=len)
        if value is True:
            words.append(flag)
        else:
            words += [flag, *map(str, value if isinstance(value, list) else [value])]
    return words


def _show(text: str, options: argparse.Namespace) -> int:
    """The script, and how a row is started in it."""
    print(text)
    nodes = options.nodes or 1
    if nodes > 1:
        line = slurm.srun(nodes, 0) + supervisor_words(Path("OUT/runs/ROW/launch-TOKEN"))
        shown = " ".join(line).replace("--cpus-per-task=0", "--cpus-per-task=$SLURM_CPUS_ON_NODE")
        print(f"# each row on {nodes} nodes is a step of its own:\n# {shown}")
    return OK


def _pass_on(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _left(job: jobs.Job, out: Path, console: Console) -> int:
    """Ctrl-C: the job goes on, unless it is told to end."""
    answer = "d"
    if sys.stdin.isatty():
        try:
            answer = input(f"\njob {job.number} goes on. [d]etach or [c]ancel it? ").strip().lower()
        except (EOFError, KeyboardInterrupt):
            answer = "d"
    if answer.startswith("c"):
        job.cancel()
        _over(job, out, console)
    else:
        console.print(f"job {job.number} goes on; the same command follows it again")
    return INTERRUPTED


def _over(job: jobs.Job, out: Path, console: Console) -> int:
    """The job has ended: rows that it could not write are, and the report is made again."""
    job.pass_on(_pass_on)
    state = job.ended()
    if state:
        console.print(f"job {job.number} ended as {state.word}", style="yellow")
    settled = jobs.settle(out, state)
    results, skipped = load_all(out)
    if settled:
        show(results, skipped, out, console)
    if not results:
        raise SpecError(f"job {job.number} left no result; see {job.output}")
    return exit_code(results)

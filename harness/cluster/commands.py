"""Options and hooks of ``run`` and ``doctor`` for several machines, and ``run --on slurm``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from harness import ROOT
from harness.cluster import slurm
from harness.cluster.meeting import Allocation, Session, find, follow
from harness.commands.console import OK, short
from harness.commands.options import seconds
from harness.spec import SpecError

if TYPE_CHECKING:
    from harness.cluster.leader import Nodes


SILENCE_SECONDS = 60.0
"""Time without a sign of a node, or without a step, after which a row is ended from outside."""
OWN = ("on", "site", "time", "dry_run", "parser", "act", "help", "node_rank", "head", "out")
"""Options that are of the submission and not of the job."""
EXPORTS = ("HEADROOM_PYTHON", "HEADROOM_VENV", "HEADROOM_SCRATCH", "HEADROOM_INTERFACE")


def add_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options that say which machine this is, of how many."""
    group = parser.add_argument_group("several machines (docs/how-to/cluster.md)")
    text = "number of machines, each with the same number of processes (default: 1)"
    group.add_argument("--nodes", type=int, metavar="N", help=text)
    text = "index of this machine; 0 is the head (default: from the job's variables)"
    group.add_argument("--node-rank", type=int, metavar="R", help=text)
    text = "address of node 0 (default: from the job's variables)"
    group.add_argument("--head", metavar="ADDRESS", help=text)
    text = (
        f"seconds without a sign of life after which a node is lost (default: {SILENCE_SECONDS:g})"
    )
    group.add_argument(
        "--silence", type=seconds, metavar="SECONDS", default=SILENCE_SECONDS, help=text
    )
    return group


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add those of ``run``: the same, and the options of a submission."""
    group = add_arguments(parser)
    text = "submit the suite as one Slurm job (default: run here)"
    group.add_argument("--on", choices=("slurm",), help=text)
    text = "file with your site's #SBATCH and shell lines for the job's script (default: none)"
    group.add_argument("--site", type=Path, metavar="FILE", help=text)
    text = "time limit of the job in Slurm's format: 4:00:00 (default: the partition's)"
    group.add_argument("--time", metavar="T", help=text)
    parser.set_defaults(parser=parser)


def elsewhere(options: argparse.Namespace, out: Path, name: str, console: Console) -> int | None:
    """Run the command elsewhere, or follow its leader; the exit code, or None to run it here.

    Raises:
        BadInput: the nodes cannot be used.
    """
    if getattr(options, "on", None):
        return _submit(options, out, name, console)
    here = _allocation(options)
    if here is None or here.rank == 0:
        return None
    if here.rank is None:
        words = [sys.executable, "-m", "harness", *sys.argv[1:]]
        sys.stdout.flush()
        os.execvp("srun", [*slurm.srun(here.nodes, os.environ), *words])
    from harness.cluster import supervisor

    console.print(f"node {here.rank} of {here.nodes}, led by {here.head} ({here.starter})")

    def serve(folder: Path) -> None:
        console.print(f"node {here.rank}: {folder.parent.name}", soft_wrap=True)
        supervisor.serve(folder, here.rank)

    follow(out, here.rank, options.silence, serve)
    return OK


def _allocation(options: argparse.Namespace) -> Allocation | None:
    """Return this machine among ``--nodes``; None if one machine is enough."""
    if (options.nodes or 1) < 2 or getattr(options, "dry_run", False):
        return None
    return find(os.environ, options.nodes, options.node_rank, options.head)


# ---- the leader ----


@contextlib.contextmanager
def machines(options: argparse.Namespace, out: Path, console: Console) -> Iterator[Nodes | None]:
    """Return the nodes of a command from their meeting to their parting; None on one machine."""
    from harness.cluster.leader import Nodes

    here = _allocation(options)
    if here is None:
        yield None
        return
    session = Session(out, here.nodes)
    console.print(f"node 0 of {here.nodes} ({here.starter}) leads; they meet in {out / 'nodes'}")
    with session.open(console.print):
        yield Nodes(nodes=here.nodes, head=here.head, silence=options.silence, session=session)


# ---- a Slurm job ----


def _submit(options: argparse.Namespace, out: Path, name: str, console: Console) -> int:
    """Submit the suite as a job, or print its script; the exit code."""
    nodes = options.nodes or 1
    if nodes < 1:
        raise SpecError(f"nodes is {nodes}; give --nodes at least 1")
    text = slurm.script(
        slurm.read_site(options.site) if options.site else slurm.Site(),
        [str(ROOT / "run.sh"), "run", *typed(options), "--out", str(out)],
        name=f"headroom-{name}",
        nodes=nodes,
        time=options.time,
        folder=out,
        where=Path.cwd(),
        exports={key: os.environ[key] for key in EXPORTS if os.environ.get(key)},
    )
    if options.dry_run:
        print(text)
        return OK

    from harness.suite.run import check_out

    check_out(out)
    number = slurm.submit(text, out)
    output = short(out / slurm.OUTPUT.format(number))
    message = (
        f"job {number}: {short(out / 'suite.sbatch')}. Follow it with tail -F {output}, and "
        f"end it with scancel {number}."
    )
    console.print(Text(message), soft_wrap=True)
    return OK


def typed(options: argparse.Namespace) -> list[str]:
    """Return the options as they were typed, without those of the submission."""
    words: list[str] = []
    for action in options.parser._actions:
        value = getattr(options, action.dest, None)
        if action.dest in OWN or value == action.default or value is None:
            continue
        flag = max(action.option_strings, key=len)
        if value is True:
            words.append(flag)
        else:
            words += [flag, *map(str, value if isinstance(value, list) else [value])]
    return words

"""``--nodes N``: the options of a command that may run on several machines, and who leads it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.commands.console import OK, make_console
from harness.commands.options import seconds
from harness.launch import launch
from harness.nodes import launch as nodes_launch
from harness.nodes.allocation import Allocation, find
from harness.nodes.files import Ready
from harness.nodes.place import SILENCE_SECONDS, Each, Place, Steps
from harness.nodes.session import Session, follow
from harness.nodes.survey import SurveyError, survey
from harness.resolve import Resolved
from harness.result import Result
from harness.system.machine import Machine

__all__ = [
    "add_arguments",
    "allocation",
    "check_leader",
    "followed",
    "meeting",
    "starter",
    "surveyed",
    "table",
    "told",
]


def add_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The options that say which machine this is, of how many."""
    group = parser.add_argument_group("several machines (docs/cluster.md)")
    told = "machines that share the processes alike (default: 1)"
    group.add_argument("--nodes", type=int, metavar="N", help=told)
    told = "which of them this is, 0 leads (default: as the job's variables say)"
    group.add_argument("--node-rank", type=int, metavar="R", help=told)
    told = "address of node 0 (default: as the job's variables say)"
    group.add_argument("--head", metavar="ADDRESS", help=told)
    told = f"a node without a sign for so long is lost (default: {SILENCE_SECONDS:g})"
    group.add_argument(
        "--silence", type=seconds, metavar="SECONDS", default=SILENCE_SECONDS, help=told
    )
    return group


def allocation(options: argparse.Namespace) -> Allocation | None:
    """This machine's place among ``--nodes``; None where one machine is enough.

    Raises:
        AllocationError: nobody says which of them this is.
    """
    if (options.nodes or 1) < 2:
        return None
    return find(os.environ, options.nodes, options.node_rank, options.head)


def followed(here: Allocation, options: argparse.Namespace, out: Path) -> int:
    """Another node than the head: take part in what it leads; the exit code."""
    console = make_console()
    console.print(f"node {here.rank} of {here.nodes}, led by {here.head} ({here.starter})")
    follow(out, here.rank, options.silence, console.print)
    return OK


@contextlib.contextmanager
def meeting(
    here: Allocation | None, options: argparse.Namespace, out: Path, console: Console
) -> Iterator[Place | None]:
    """The nodes as a place to run rows, from their meeting to their parting; None without."""
    if here is None:
        yield None
        return
    common = {"nodes": here.nodes, "head": here.head, "silence": options.silence}
    if here.by_steps:
        cpus = os.environ.get("SLURM_CPUS_ON_NODE", "")
        cores = int(cpus) if cpus.isdigit() else 1
        yield Steps(**common, job=os.environ["SLURM_JOB_ID"], cpus=cores)
        return
    session = Session(out, here.nodes)
    console.print(f"node 0 of {here.nodes} ({here.starter}) leads; they meet in {session.folder}")
    with session.open(console.print):
        yield Each(**common, session=session)


def surveyed(
    place: Place, out: Path, machine: Machine, device: str, ops: Sequence[str], console: Console
) -> tuple[Machine, list[Ready]]:
    """``machine`` as the least of all nodes, and what each has; the wire is said."""
    ready = survey(place, out, device, ops)
    check_leader(socket.gethostname(), [r.host for r in ready])
    console.print(told(place, ready), highlight=False, soft_wrap=True)
    for note in place.notes:
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
    others = tuple(_decisive(r) for r in ready)
    return dataclasses.replace(machine, cores=min(r.cores for r in ready), others=others), ready


def check_leader(host: str, hosts: Sequence[str]) -> None:
    """Whoever leads plans the rows by its own machine: a login node has other devices.

    Raises:
        SurveyError: it is none of the nodes.
    """
    if host not in hosts:
        raise SurveyError(
            f"this shell is on {host}, which is none of the nodes ({', '.join(hosts)}); start the "
            f"same command on all of them: srun --nodes={len(hosts)} --ntasks-per-node=1 ./run.sh "
            f"run --nodes {len(hosts)} ..., or use --on slurm"
        )


def _decisive(ready: Ready) -> list[Any]:
    return [ready.devices, ready.driver, ready.cpu, ready.cores]


def told(place: Place, ready: Sequence[Ready]) -> str:
    """The nodes and the network between them, in a line."""
    hosts, wire = ", ".join(r.host for r in ready), place.wire
    return (
        f"{place.nodes} nodes ({hosts}); between them {wire.bandwidth / 1e9:.3g} GB/s, "
        f"{wire.latency_seconds * 1e3:.3g} ms an all-reduce ({wire.backend})"
    )


def starter(place: Place | None) -> Callable[..., Result]:
    """What runs a row: on the nodes of ``place``, or on this machine alone."""
    return functools.partial(_start, place=place) if place else launch.run


def _start(resolved: Resolved, folder: Path, *, place: Place, **options: Any) -> Result:
    if resolved.spec.nodes == 1:
        return launch.run(resolved, folder, **options)
    return nodes_launch.run(resolved, folder, place=place, **options)


def table(ready: Sequence[Ready]) -> Table:
    """What each node has, a line each."""
    found = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("node", "host", "address", "cores", "memory", "devices"):
        found.add_column(name, overflow="fold")
    for node in ready:
        address = node.address or ", ".join(node.addresses)
        memory = f"{node.memory_bytes / 2**30:.1f} GiB"
        devices = ", ".join(node.devices) or node.cpu
        found.add_row(str(node.rank), node.host, address, str(node.cores), memory, devices)
    return found

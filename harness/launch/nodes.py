"""Rows on several machines, each of which runs the same command.

Every node plans the same rows, and meets the others row by row through torchrun's c10d rendezvous
under the row's own name: nodes with other sources, packages or settings never train one together.
Node 0's folder has the results. The others keep copies below ``OUT/node-RANK``, so that a suite
resumes on all nodes at the same row without a shared file system.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.json_files import write_json
from harness.launch import command, launch
from harness.launch.command import CONF, HEAD, INTERFACE, LOCAL, MEETING, PORT, RANK
from harness.launch.outcome import SECONDARY, headline
from harness.launch.sources import MEASURED, digest
from harness.resolve import Resolved
from harness.result import Result, Status
from harness.spec import SpecError
from harness.system.machine import Machine

JOIN_SECONDS = 120.0
"""Time for the others to join a row, after the longest that their previous row may take."""
RANKS = ("SLURM_NODEID", "PET_NODE_RANK", "NODE_RANK")
"""Variables that a job sets on each node: Slurm, Kubernetes' PyTorchJob, dstack and SkyPilot."""
NO_MEETING = ("RendezvousTimeoutError", "RendezvousConnectionError", "RendezvousClosedError")
LOST = "check that node's power, network and output, then run the same command on all nodes"
LATE = (
    "start the same command, sources and packages on all nodes; if one keeps this row from an "
    "earlier run, give --fresh to all"
)


@dataclass(frozen=True)
class Node:
    """This machine, one of ``count``; node 0 holds the rendezvous at ``host:port``.

    The others reach it at ``address``, through the network ``interface``.
    """

    rank: int
    count: int
    host: str
    port: int
    address: str
    interface: str

    def folder(self, out: Path) -> Path:
        return out / f"node-{self.rank}" if self.rank else out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several machines (docs/how-to/cluster.md)")
    text = "number of machines; type the same command on each (default: 1)"
    group.add_argument("--nodes", type=int, metavar="N", help=text)
    text = "address of node 0, and a free port that the others can reach (default: none)"
    group.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help=text)
    text = "index of this machine (default: from the job's variables, or 0 if HOST is this machine)"
    group.add_argument("--node-rank", type=int, metavar="R", help=text)


def this_node(options: argparse.Namespace, environ: Mapping[str, str]) -> Node | None:
    """Return this machine among ``--nodes``; None if one machine is enough.

    Raises:
        SpecError: an option is missing or wrong, or the endpoint cannot be reached.
    """
    count = options.nodes or 1
    if count < 2 or options.dry_run:
        return None
    host, _, port = (options.rdzv_endpoint or "").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise SpecError(
            f"rdzv-endpoint is {options.rdzv_endpoint!r}; give --rdzv-endpoint HOST:PORT, node 0's "
            "address and a free port, the same on all nodes"
        )
    address, interface = _own_end(host, int(port))
    rank = options.node_rank
    if rank is None:
        said = next((environ[name] for name in RANKS if environ.get(name, "").isdigit()), None)
        at_home = address == socket.gethostbyname(host)
        rank = int(said) if said else 0 if at_home else 1 if count == 2 else None
    if rank is None or not 0 <= rank < count:
        raise SpecError(f"node-rank is {rank}; give --node-rank 0 to {count - 1}, another per node")
    return Node(rank, count, host, int(port), address, interface)


def _own_end(host: str, port: int) -> tuple[str, str]:
    """Return the address and the interface by which this machine reaches ``host``."""
    import psutil

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            address = probe.getsockname()[0]
    except OSError as error:
        why = error.strerror or error
        raise SpecError(f"rdzv-endpoint is {host}:{port}: {why}; give node 0's address") from None
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            # Node 0 reaches its own address through loopback, and the others do not.
            return address, os.environ.get("HEADROOM_INTERFACE", name)
    raise SpecError(f"no network interface has {address}; set HEADROOM_INTERFACE")


def meeting_of(resolved: Resolved, machine: Machine) -> str:
    """Return a row's name for nodes to meet under: equal for equal spec, sources and packages."""
    facts = [resolved.spec.key, digest(MEASURED), machine.versions]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def start_on(node: Node, machine: Machine) -> Callable[..., Result]:
    """Return the function that runs a row, with the arguments of ``launch.run``."""

    def start(resolved: Resolved, folder: Path, *, timeout: float, **given: Any) -> Result:
        if resolved.spec.nodes == 1:
            return launch.run(resolved, folder, timeout=timeout, **given)
        join = timeout + JOIN_SECONDS  # another node may still be within its previous row
        conf = f"is_host={int(node.rank == 0)},join_timeout={join:.0f},read_timeout={join:.0f}"
        facts = {
            **{RANK: str(node.rank), HEAD: node.host, PORT: str(node.port), CONF: conf},
            **{INTERFACE: node.interface, LOCAL: node.address},
            MEETING: meeting_of(resolved, machine),
        }
        words = command.as_node(command.command(resolved, folder.absolute(), port=0), facts)
        variables = command.environment(resolved)
        added = {name: facts.get(value, value) for name, value in variables.items()}
        began: list[float] = []

        def stop() -> str | None:
            if not began and _begun(folder):
                began.append(time.monotonic())
            return "timeout" if began and time.monotonic() - began[0] > timeout else None

        row = launch.run(
            resolved,
            folder,
            timeout=join + timeout,
            argv=lambda port: words,
            added=added | command.group_limit(timeout),
            stop=stop,
            **given,
        )
        explained = _explained(row, _begun(folder), join)
        launch.write(explained, folder)
        return explained

    return start


def _begun(folder: Path) -> bool:
    """Return whether this node's ranks have started, which they do once all nodes have joined."""
    return any((folder / "ranks").glob("rank*.status.json"))


def _explained(row: Result, begun: bool, join: float) -> Result:
    """Return a row that failed because of another node with that cause."""
    if row.status not in (Status.FAILED, Status.TIMEOUT):
        return row
    late = any(name in f"{row.reason} {row.log_tail}" for name in NO_MEETING)
    if not begun and (late or row.status is Status.TIMEOUT):
        reason, hint = f"not all {row.spec.nodes} nodes joined this row within {join:.0f} s", LATE
    elif begun and row.status is Status.FAILED and SECONDARY.search(row.reason or ""):
        at = f"phase {row.phase}" + (f", step {row.step}" if row.step else "")
        reason, hint = f"another node stopped answering in {at}: {row.reason}", LOST
    else:
        return row
    return dataclasses.replace(row, status=Status.NODE_LOST, reason=reason, way_out=hint)


# ---- in the ranks ----


def share(result: Result | None) -> Result | None:
    """Return rank 0's result on the first rank of each node, which writes it there; else None."""
    import torch

    if int(os.environ.get("GROUP_WORLD_SIZE", 1)) < 2:
        return result
    found = [result]
    torch.distributed.broadcast_object_list(found, src=0)
    return found[0] if os.environ["LOCAL_RANK"] == "0" else None


def exchange_failures(folder: Path, rank: int, failure: dict[str, Any]) -> None:
    """Tell the other nodes why this rank failed, and write what theirs said below ``folder``.

    The others' collectives only say that the connection closed. The agents' store outlives the
    ranks by some seconds.
    """
    import torch

    if int(os.environ.get("GROUP_WORLD_SIZE", 1)) < 2:
        return
    own = SECONDARY.search(headline(failure)) is None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    key = f"headroom/{os.environ.get('TORCHELASTIC_RUN_ID')}/failure"
    try:
        seconds = datetime.timedelta(seconds=5)
        store = torch.distributed.TCPStore(address, port, is_master=False, timeout=seconds)
        if own:
            store.set(key, json.dumps({**failure, "host": socket.gethostname()}))
        elif found := json.loads(store.get(key)):  # waits up to the store's timeout
            write_json(folder / "ranks" / f"rank{found['rank']}.failure.json", found)
    except (RuntimeError, ValueError, OSError):  # node 0, which holds the store, is lost itself
        return

"""One node's supervisor: it starts this node's part of a launch, watches, and says how it ended.

    python -m harness.nodes.supervisor FOLDER [RANK]

Without RANK it is a task of a Slurm step, and SLURM_NODEID says it. It lives as long as one row.
Whatever happens to the others, its part ends in bounded time, nothing of it stays on this node, and
the end file says why; its own exit code says only whether it could.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from harness import ROOT
from harness.launch import launch
from harness.launch.command import (
    HEAD,
    INTERFACE,
    PORT,
    RANK,
    as_node,
    free_port,
    group_limit,
    inherited,
)
from harness.nodes import network, preflight
from harness.nodes.files import End, Go, Order, Ready, log_of, read, write
from harness.nodes.local import own_folder
from harness.nodes.sentry import Sentry
from harness.system import kernel, process, tree

__all__ = ["READY_SECONDS", "serve"]

READY_SECONDS = 120.0
"""For all nodes to say what they have; compiling ops comes before."""
POLL_SECONDS = 0.1


def serve(folder: Path, rank: int, door: network.Door | None = None) -> End | None:
    """This node's part of the launch in ``folder``, from what it has to how it ended; None where
    the leader did not let it begin.

    Raises:
        process.Interrupted: a signal came; the part has ended, and the end file says so.
    """
    order = _await(lambda: read(folder, Order), READY_SECONDS)
    if order is None:
        return None
    own = door or network.Door()
    try:
        ready = _ready(order, folder, rank, own)
        write(folder, ready, rank)
        go = _await(lambda: read(folder, Go, token=order.token), READY_SECONDS, own)
        if go is None or go.refused:
            return None
        return _run(order, go, folder, ready, own)
    finally:
        if door is None:
            own.close()


def _await(look: Callable[[], object], seconds: float, door: network.Door | None = None):
    """What ``look`` finds within so many seconds; None where it does not."""
    deadline = time.monotonic() + seconds
    while (found := look()) is None and time.monotonic() < deadline:
        if door:
            door.answer()
        time.sleep(POLL_SECONDS)
    return found


def _ready(order: Order, folder: Path, rank: int, door: network.Door) -> Ready:
    """What this node has; all but the head find their way to it first."""
    ready = preflight.look(order, rank)
    if rank == 0:
        ready.door, ready.port = door.port, free_port()
        return ready
    head = _await(lambda: read(folder, Ready, 0, order.token), READY_SECONDS)
    if head is None:
        ready.lack = ready.lack or "it sees no word of node 0; is the results folder shared?"
        return ready
    hosts = [order.head, *head.addresses]
    way = _await(lambda: network.reach(hosts, head.door), 15.0)
    if way:
        ready.reached, ready.address = way
    else:
        told = f"it cannot reach node 0 ({head.host}) at {', '.join(hosts)}, port {head.door}"
        ready.lack = ready.lack or f"{told}; open the network between them, or give --head ADDRESS"
    return ready


def _run(order: Order, go: Go, folder: Path, ready: Ready, door: network.Door) -> End:
    with own_folder(order.token, ready.rank) as local:
        return _run_in(local, order, go, folder, ready, door)


def _run_in(
    local: Path, order: Order, go: Go, folder: Path, ready: Ready, door: network.Door
) -> End:
    address = ready.address or go.head
    interface = os.environ.get("HEADROOM_INTERFACE") or network.interface_of(address) or "lo"
    sentry = Sentry(order, go, folder, ready.rank, local, door)
    kills, interrupted = kernel.memory_kills(), None
    try:
        ended = process.run_child(
            as_node(order.words, _facts(go, ready.rank)),
            cwd=ROOT,
            env=inherited() | _environment(order, ready, interface, local),
            log=folder / log_of(ready.rank),
            timeout=order.timeout,
            on_tick=sentry.tick,
            finished=sentry.finished,
            stop=sentry.stop,
            scratch=(local,),
        )
    except process.Interrupted as signalled:
        ended, interrupted = signalled.ended, signalled
    end = _end(order, ready, interface, ended, kernel.memory_kills().since(kills), sentry)
    _tell(folder, end)
    if interrupted:
        raise interrupted
    return end


def _facts(go: Go, rank: int) -> dict[str, str]:
    return {RANK: str(rank), HEAD: go.head, PORT: str(go.port)}


def _environment(order: Order, ready: Ready, interface: str, local: Path) -> dict[str, str]:
    """The order's variables with what is this node's own: cores, interface, folders."""
    given = order.environment.items()
    own = {key: interface if value == INTERFACE else value for key, value in given}
    own["OMP_NUM_THREADS"] = str(max(1, ready.cores // order.processes))
    own |= {"HEADROOM_TOKEN": order.token, "HEADROOM_LOCAL": str(local)}
    own |= launch.own_caches(local / launch.COMPILED) | group_limit(order.timeout)
    if ready.cpu != order.cpu:
        # An op compiled for another processor may hold instructions that this one lacks.
        name = "".join(c if c.isalnum() else "_" for c in ready.cpu)
        own["TORCH_EXTENSIONS_DIR"] = f"{tree.extensions_folder()}-{name}"
    return own


def _end(
    order: Order,
    ready: Ready,
    interface: str,
    ended: process.Ended,
    kills: kernel.MemoryKills,
    sentry: Sentry,
) -> End:
    return End(
        token=order.token,
        rank=ready.rank,
        host=socket.gethostname(),
        exit_code=ended.exit_code,
        signal=ended.signal,
        stopped=ended.stopped,
        lost=sentry.lost,
        wall_seconds=ended.wall_seconds,
        tree_peak_bytes=ended.tree_peak_bytes,
        tree_processes=ended.tree_processes,
        survivors=ended.survivors,
        machine_kills=kills.machine,
        group_kills=kills.group,
        group_limit_bytes=kills.limit_bytes,
        interface=interface,
        others=list(ended.others),
        statuses=sentry.statuses,
        failures=sentry.failures,
    )


def _tell(folder: Path, end: End) -> None:
    """The end file; a folder that is gone or full is tried for a while: the leader may be told by
    nothing else."""
    for left in reversed(range(5)):
        try:
            write(folder, end, end.rank, durable=True)
            return
        except OSError:
            time.sleep(1.0 if left else 0.0)


def main(argv: list[str]) -> int:
    """Entry point; 0 where the end was told."""
    folder, rank = Path(argv[0]), int((argv[1:] or [os.environ["SLURM_NODEID"]])[0])
    try:
        end = serve(folder, rank)
    except process.Interrupted:
        return 0
    return 0 if end is None or end.survivors == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

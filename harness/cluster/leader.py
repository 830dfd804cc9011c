"""Node 0's side: one row or survey on several nodes, as an order, their messages, and a result.

Each launch has a folder and a token of its own: a node that comes back after it was lost writes
into a folder that nobody reads any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from harness import result
from harness.cluster import preflight, supervisor
from harness.cluster.meeting import Beat, End, Go, Order, Ready, Session, log_of, read, write
from harness.cluster.outcome import NodeFacts, classify_nodes
from harness.cluster.slurm import ended_by
from harness.launch import launch, outcome
from harness.launch.command import command, display, environment, left_in
from harness.resolve import Resolved
from harness.result import LaunchRecord, NodeRecord, Result, Status, Wire
from harness.spec import Spec
from harness.system import machine as kernel
from harness.system import process
from harness.system.machine import Machine
from harness.void import settle
from strategies.base import BadInput, Reason

TRIES = 3
END_SECONDS = 20.0
"""Time for the other nodes' end files after the own part."""
HURRY_SECONDS = 4.0
"""The same after a signal to this process."""
STATUS_SECONDS = 0.5
SURVEY_SECONDS = 120.0


class Launched:
    """A launch in ``folder``: the messages of its nodes, and how the own part ended."""

    def __init__(self, order: Order, folder: Path, on_status: launch.OnStatus) -> None:
        self.order, self.folder, self.on_status = order, folder, on_status
        self.ready: dict[int, Ready] = {}
        self.go: Go | None = None
        self.beats: dict[int, Beat] = {}
        self.ends: dict[int, End | None] = {}
        self.interrupt: KeyboardInterrupt | None = None
        self.began = time.monotonic()
        self.seconds = 0.0
        self._last = -STATUS_SECONDS

    def run(self, session: Session) -> None:
        """Have all nodes carry out the order, to its end. ``interrupt`` is a signal that came.

        Raises:
            LaunchError: the launcher cannot be started.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.folder, self.order, durable=True)
        session.publish(self.folder)
        try:
            supervisor.serve(self.folder, 0, self.tick)
        except KeyboardInterrupt as signalled:
            self.interrupt = signalled
        except process.CannotStart as error:
            text = f"cannot start {error.filename}: {error.strerror}"
            raise launch.LaunchError(text) from None
        self.seconds = time.monotonic() - self.began
        self.look()
        if self.interrupt and self.go is None:  # the other nodes wait for it
            why = Reason("the leader was interrupted")
            write(self.folder, Go(token=self.order.token, refused=why))
        # A scheduler that ends a job leaves its leader half a minute.
        self.end(HURRY_SECONDS if self.interrupt else END_SECONDS)

    def tick(self) -> None:
        """Read the nodes' messages and let them begin, twice a second while the own part runs."""
        elapsed = time.monotonic() - self.began
        if elapsed - self._last < STATUS_SECONDS:
            return
        self._last = elapsed
        self.look()
        if self.go is None:
            self.meet()
        statuses = tuple(s for beat in self.beats.values() for s in beat.statuses)
        fullest = max((beat.tree_bytes for beat in self.beats.values()), default=0)
        self.on_status(launch.status(statuses, fullest, elapsed))

    def look(self) -> None:
        """Read the nodes' messages."""
        for rank in range(self.order.nodes):
            ready = self.ready.get(rank) or read(self.folder, Ready, rank, self.order.token)
            beat = read(self.folder, Beat, rank, self.order.token)
            self.ready |= {rank: ready} if ready else {}
            self.beats |= {rank: beat} if beat else {}

    def meet(self) -> None:
        """Let the nodes begin once all are ready and alike, or refuse."""
        there = [self.ready[rank] for rank in sorted(self.ready)]
        lacking = [ready for ready in there if ready.lack]
        if not lacking and len(there) < self.order.nodes:
            return
        go = Go(token=self.order.token)
        go.refused = preflight.disagreement(self.order, lacking or there)
        if not go.refused:
            go.head = preflight.head_address(there)
            go.door, go.port = there[0].door, there[0].port
        write(self.folder, go)
        self.go = go

    def end(self, seconds: float) -> None:
        """Wait so long for each node's end file; None for a node without one."""
        deadline = time.monotonic() + seconds
        while True:
            ranks = range(self.order.nodes)
            self.ends = {r: read(self.folder, End, r, self.order.token) for r in ranks}
            if all(self.ends.values()) or time.monotonic() > deadline:
                return
            time.sleep(0.2)

    def records(self) -> list[NodeRecord]:
        """Return the nodes as a result keeps them."""
        return [self._record_of(rank, end) for rank, end in self.ends.items()]

    def _record_of(self, rank: int, end: End | None) -> NodeRecord:
        known = self.ready.get(rank) or Ready(token="", rank=rank, host=end.host if end else "")
        names = ("host", "cores", "memory_bytes", "devices", "driver", "address")
        facts = {name: getattr(known, name) for name in names}
        record = NodeRecord(rank=rank, answered=end is not None, **facts)
        if end is not None:
            record.exit_code, record.stopped = end.code, end.stopped
            record.survivors, record.interface = end.survivors, end.interface
            record.tree_peak_bytes = end.tree_peak_bytes or None
        return record

    def launch_record(self) -> LaunchRecord:
        """Return the record of a launch, with the memory of the node that held most."""
        known, first = [end for end in self.ends.values() if end], self.ends.get(0)
        fullest = max(known, key=lambda end: end.tree_peak_bytes, default=None)
        return LaunchRecord(
            exit_code=first.code if first else None,
            wall_seconds=self.seconds,
            tree_peak_bytes=(fullest.tree_peak_bytes or None) if fullest else None,
            tree_processes=(fullest.tree_processes or None) if fullest else None,
            killed=any(end.stopped for end in known) or len(known) < len(self.ends),
            port=self.go.port if self.go else None,
            others=[pid for end in known for pid in end.others],
        )


# ---- a survey ----


@dataclass(kw_only=True)
class Nodes:
    """The machines of a session, as ``run`` and ``doctor`` use them. ``ready``, ``wire`` and
    ``notes`` are from their survey; ``gone`` names a node that was lost."""

    nodes: int
    head: str
    silence: float
    session: Session
    ready: list[Ready] = field(default_factory=list)
    wire: Wire | None = None
    notes: list[str] = field(default_factory=list)
    gone: str = ""

    def order(self, out: Path, **given: Any) -> Order:
        """Return an order to all nodes, with a token of its own."""
        return Order(
            token=uuid.uuid4().hex[:12],
            nodes=self.nodes,
            head=self.head,
            out=str(out),
            silence=self.silence,
            code=preflight.code(),
            versions=preflight.versions(),
            cpu=kernel.cpu_name(),
            **given,
        )

    def survey(
        self, machine: Machine, out: Path, device: str, ops: Sequence[str], console: Console
    ) -> Machine:
        """Compile each node's ops, measure and print the network; ``machine`` with the least cores
        of all nodes.

        Raises:
            BadInput: a node lacks something, is unlike the others, or cannot be reached.
        """
        order = self.order(
            out,
            words=preflight.wire_words(device, self.nodes),
            environment=preflight.wire_environment(device),
            processes=1,
            timeout=SURVEY_SECONDS,
            ops=sorted(ops),
        )
        here = out / "nodes" / "survey" / order.token
        order.words += ["--out", str(here / "wire.json")]
        launched = Launched(order, here, lambda status: None)
        launched.run(self.session)
        if launched.interrupt:
            raise launched.interrupt
        if refused := _refused(launched):
            raise BadInput(f"{refused.reason}; {refused.hint}")
        self.wire = preflight.wire_found(here, launched.ends)
        self.notes += preflight.slow(self.wire)
        self.ready = [launched.ready[rank] for rank in sorted(launched.ready)]
        self._tell(console)
        others = tuple([r.devices, r.driver, r.cpu, r.cores] for r in self.ready)
        return dataclasses.replace(machine, cores=min(r.cores for r in self.ready), others=others)

    def _tell(self, console: Console) -> None:
        """Print the network and its notes."""
        hosts, wire = ", ".join(r.host for r in self.ready), self.wire
        text = f"{self.nodes} nodes ({hosts}); between them {wire.bandwidth / 1e9:.3g} GB/s, "
        text += f"{wire.latency_seconds * 1e3:.3g} ms an all-reduce ({wire.backend})"
        console.print(text, highlight=False, soft_wrap=True)
        for note in self.notes:
            console.print(note, style="yellow", highlight=False, soft_wrap=True)

    def start(self, resolved: Resolved, folder: Path, **options: Any) -> Result:
        """Run a row: on all nodes, or on this one if its spec is of one."""
        if resolved.spec.nodes == 1:
            return launch.run(resolved, folder, **options)
        return run(resolved, folder, nodes=self, **options)

    def rows(self) -> list[list[str]]:
        """Return each node: rank, host, address, cores, memory and devices."""
        return [
            [
                str(node.rank),
                node.host,
                node.address or ", ".join(node.addresses),
                str(node.cores),
                f"{node.memory_bytes / 2**30:.1f} GiB",
                ", ".join(node.devices) or node.cpu,
            ]
            for node in self.ready
        ]


def _refused(launched: Launched) -> outcome.Outcome | None:
    """Why the nodes did not begin."""
    if launched.go is None:
        gone = [f"node {r}" for r in range(launched.order.nodes) if r not in launched.ready]
        reason = f"{', '.join(gone) or 'the leader'} gave no sign before the start"
        shared = f"that {launched.order.out} is on a file system that all nodes share"
        hint = f"check that node, and {shared}"
        return outcome.Outcome(Status.NODE_LOST, reason, hint)
    if not launched.go.refused:
        return None
    why = launched.go.refused
    return outcome.Outcome(Status.UNSUPPORTED, why.text, why.hint or "see docs/how-to/cluster.md")


# ---- a row ----


def run(
    resolved: Resolved,
    folder: Path,
    *,
    nodes: Nodes,
    timeout: float | None,
    on_status: launch.OnStatus = lambda status: None,
    more: Sequence[str] = (),
) -> Result:
    """Run a row on ``nodes``, write ``folder/result.json`` and return it; as
    ``harness.launch.launch.run``.

    Raises:
        LaunchError: the folder cannot be written, or the launcher cannot be started.
        KeyboardInterrupt: a signal came; the row is written as interrupted first.
    """
    folder = Path(folder).absolute()
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    for left in reversed(range(TRIES)):
        launch.prepare(folder)
        for old in folder.glob("launch-*"):  # files that a lost node holds open may stay
            shutil.rmtree(old, ignore_errors=True)
        if nodes.gone:
            row = _not_begun(resolved, folder, nodes)
            launch.write(row, folder)
            return row
        launched = _launched(resolved, folder, nodes, timeout, on_status, more)
        finished, facts = _finished(launched), node_facts(resolved.spec, launched)
        whole = whole_facts(resolved.spec, launched, facts)
        if finished or not left or not outcome.retryable(whole):
            break
    if finished:
        ready = [launched.ready[rank] for rank in sorted(launched.ready)]
        row = settle(finished, preflight.mixed(ready))
    else:
        row = _unfinished(resolved, launched, facts, whole, nodes.silence)
    row.command, row.started = display(resolved, folder, more), row.started or started
    row.launch, row.nodes, row.wire = launched.launch_record(), launched.records(), nodes.wire
    if row.status is Status.NODE_LOST:
        lost = [f"node {node.rank} ({node.host})" for node in row.nodes if not node.answered]
        nodes.gone = ", ".join(lost)
    row.meter_notes += [note for note in nodes.notes if note not in row.meter_notes]
    _keep(launched, folder)
    launch.write(row, folder)
    if launched.interrupt:
        raise launched.interrupt
    return row


def _not_begun(resolved: Resolved, folder: Path, nodes: Nodes) -> Result:
    """Return the row of nodes of which one was lost."""
    reason = f"not started: {nodes.gone} was lost in an earlier row"
    hint = "start the command again on nodes that answer: the suite resumes"
    told = display(resolved, folder)
    return Result.not_run(resolved, Status.NODE_LOST, reason, hint, command=told)


def _launched(
    resolved: Resolved,
    folder: Path,
    nodes: Nodes,
    timeout: float | None,
    on_status: launch.OnStatus,
    more: Sequence[str],
) -> Launched:
    """Return the row's launch, ended. Its ranks write into its own folder and nowhere else."""
    order = nodes.order(
        folder.parent.parent,
        words=[],
        environment=environment(resolved),
        processes=resolved.spec.local_processes,
        timeout=timeout,
    )
    here = folder / f"launch-{order.token}"
    order.words = command(resolved, here, port=0, more=more)
    launched = Launched(order, here, on_status)
    launched.run(nodes.session)
    return launched


def _finished(launched: Launched) -> Result | None:
    """Return the worker's own result, if it is this launch's."""
    try:
        found = result.load(launched.folder / "result.json")
    except result.BadResult:
        return None
    return found if found.token == launched.order.token else None


def node_facts(spec: Spec, launched: Launched) -> list[NodeFacts]:
    """Return each node's facts when a launch is over; a lost node's are of its last beat."""
    found = []
    for rank, end in launched.ends.items():
        last, beat = end or End(token="", rank=rank, host="?"), launched.beats.get(rank)
        facts = outcome.Facts(
            exit_code=last.exit_code,
            signal=last.signal,
            stopped=last.stopped,
            failures=tuple(last.failures),
            statuses=tuple(last.statuses if end or not beat else beat.statuses),
            log=launch.read_log(launched.folder / log_of(rank)),
            machine_kills=last.machine_kills,
            group_kills=last.group_kills,
            group_limit_bytes=last.group_limit_bytes,
            recipe=spec.recipe,
            processes=spec.processes,
        )
        host = launched.ready[rank].host if rank in launched.ready else last.host
        found.append(NodeFacts(rank=rank, host=host, end=end, facts=facts))
    return found


def whole_facts(spec: Spec, launched: Launched, nodes: Sequence[NodeFacts]) -> outcome.Facts:
    """Return the facts of all nodes together."""
    late = any(node.facts.stopped == "timeout" for node in nodes)
    first = nodes[0].facts
    return outcome.Facts(
        exit_code=first.exit_code,
        signal=first.signal,
        stopped="interrupted" if launched.interrupt else "timeout" if late else None,
        timeout_seconds=launched.order.timeout,
        failures=tuple(f for node in nodes for f in node.facts.failures),
        statuses=tuple(s for node in nodes for s in node.facts.statuses),
        log="\n".join(node.facts.log for node in nodes),
        recipe=spec.recipe,
        processes=spec.processes,
    )


def _unfinished(
    resolved: Resolved,
    launched: Launched,
    facts: Sequence[NodeFacts],
    whole: outcome.Facts,
    silence: float,
) -> Result:
    """Return a row that says how far it came."""
    refused = None if launched.interrupt else _refused(launched)
    by = ended_by(os.environ, Path(launched.order.out)) if launched.interrupt else ""
    ended = refused or classify_nodes(whole, facts, silence, by)
    return launch.unfinished(resolved, launched.folder, whole, ended)


def _keep(launched: Launched, folder: Path) -> None:
    """Put the logs of all nodes, and the run's recordings, into the run's folder."""
    here = launched.folder
    with contextlib.suppress(OSError), (folder / "log.txt").open("w", encoding="utf-8") as stream:
        for rank in range(launched.order.nodes):
            stream.write(f"==== node {rank} ====\n{launch.read_log(here / log_of(rank))}\n")
    for name in left_in(here):
        with contextlib.suppress(OSError):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(here / name, folder / name)

"""One row on several nodes: an order to their supervisors, and one typed result of what they left.

The leader starts nothing but supervisors (``harness.nodes.launched``) and reads their files. Each
launch has a folder and a token of its own: a node that comes back from the dead writes into a
folder that nobody reads any more.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import result
from harness.launch import launch, outcome, recordings
from harness.launch.command import command, display, environment
from harness.nodes import preflight
from harness.nodes.files import End, Order, log_of
from harness.nodes.launched import END_SECONDS, Launched, make_order, start
from harness.nodes.outcome import NodeFacts, classify_nodes
from harness.nodes.place import Place
from harness.resolve import Resolved
from harness.result import LaunchRecord, Result, Status
from harness.spec import Spec
from harness.system import process

__all__ = ["abandoned", "node_facts", "run"]

TRIES = 3
HURRY_SECONDS = 4.0
"""For the other nodes' last words where this process was told to end."""


def _not_begun(resolved: Resolved, folder: Path, place: Place) -> Result:
    """The row that has no nodes to run on any more."""
    return Result(
        status=Status.NODE_LOST,
        spec=resolved.spec,
        reason=f"not begun: {place.gone} was lost in an earlier row",
        way_out="start again on nodes that answer: the suite resumes here",
        parity=resolved.recipe.parity.value,
        command=display(resolved, folder),
        meter="cuda" if resolved.spec.device == "cuda" else "resident",
        parameters=resolved.subject.parameters,
        micro_batch=resolved.micro_batch,
        accumulation=resolved.recipe.accumulation,
    )


def run(
    resolved: Resolved,
    folder: Path,
    *,
    place: Place,
    timeout: float | None,
    on_status: launch.OnStatus = lambda status: None,
    more: Sequence[str] = (),
) -> Result:
    """Run a row on the nodes of ``place``, write ``folder/result.json`` and return it; as
    ``harness.launch.launch.run``.

    Raises:
        LaunchError: the folder cannot be written. process.Interrupted: a signal came; the row is
            written as interrupted first.
    """
    folder = Path(folder).absolute()
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    if place.gone:
        row = _not_begun(resolved, folder, place)
        launch.prepare(folder)
        launch.write(row, folder)
        return row
    for left in reversed(range(TRIES)):
        launch.prepare(folder)
        _remove_launches(folder)
        order, here = _order(resolved, folder, place, timeout, more)
        launched, ended, interrupt = _launched(order, here, place, on_status)
        # A scheduler that ends a job leaves its leader half a minute, of which cleaning took some.
        ends = launched.ends(HURRY_SECONDS if interrupt else END_SECONDS)
        if not (left and not interrupt and _port_taken(resolved.spec, launched, ends)):
            break
    row = _row(resolved, launched, ends, ended, place)
    row.command, row.started = display(resolved, folder, more), row.started or started
    row.launch = _launch_record(ended, ends, launched)
    row.nodes, row.wire = launched.records(ends), place.wire
    if row.status is Status.NODE_LOST:
        silent = [record for record in row.nodes if not record.answered]
        place.gone = ", ".join(f"node {record.rank} ({record.host})" for record in silent)
    row.meter_notes += [note for note in _notes(launched, place) if note not in row.meter_notes]
    _keep(here, folder, order.nodes)
    launch.write(row, folder)
    if interrupt:
        raise interrupt
    return row


def _launched(
    order: Order, here: Path, place: Place, on_status: launch.OnStatus
) -> tuple[Launched, process.Ended, process.Interrupted | None]:
    """What was started, how it ended, and the signal that came."""
    try:
        return *start(order, here, place, on_status), None
    except process.Interrupted as signalled:
        launched = Launched(order, here, on_status)
        launched.look()
        return launched, signalled.ended, signalled


def abandoned(resolved: Resolved, folder: Path, here: Path, order: Order, place: Place) -> Result:
    """The row of a launch in ``here`` whose leader is gone, from what was left of it."""
    launched = Launched(order, here, lambda status: None)
    launched.look()
    ends = launched.ends(seconds=0.0)
    ended = process.Ended(
        exit_code=None,
        signal=None,
        wall_seconds=0.0,
        stopped=None,
        tree_peak_bytes=0,
        tree_processes=0,
        left_behind=0,
        survivors=0,
    )
    row = _row(resolved, launched, ends, ended, place)
    row.command, row.nodes = display(resolved, folder), launched.records(ends)
    _keep(here, folder, order.nodes)
    return row


def _order(
    resolved: Resolved, folder: Path, place: Place, timeout: float | None, more: Sequence[str]
) -> tuple[Order, Path]:
    """The row's order, and the launch's own folder: ranks write there and nowhere else."""
    spec = resolved.spec
    order = make_order(
        place,
        folder.parent.parent,
        words=[],
        environment=environment(resolved),
        processes=spec.local_processes,
        timeout=timeout,
    )
    here = folder / f"launch-{order.token}"
    order.words = command(resolved, here, port=0, more=more)
    return order, here


def _remove_launches(folder: Path) -> None:
    """Earlier launches' folders; what a lost node still holds open stays, and is read by nobody."""
    for old in folder.glob("launch-*"):
        shutil.rmtree(old, ignore_errors=True)


def _finished(launched: Launched) -> Result | None:
    """The worker's own result, if it is this launch's."""
    try:
        found = result.load(launched.folder / "result.json")
    except result.BadResult:
        return None
    return found if found.token == launched.order.token else None


def node_facts(spec: Spec, launched: Launched, ends: dict[int, End | None]) -> list[NodeFacts]:
    """What each node left of a launch that is over."""
    return [
        NodeFacts(
            rank=rank,
            host=launched.ready[rank].host if rank in launched.ready else "?",
            end=end,
            facts=outcome.Facts(
                exit_code=end.exit_code if end else None,
                signal=end.signal if end else None,
                stopped=end.stopped if end else None,
                failures=tuple(end.failures) if end else (),
                statuses=_statuses(launched, rank, end),
                log=launch.read_log(launched.folder / log_of(rank)),
                machine_kills=end.machine_kills if end else 0,
                group_kills=end.group_kills if end else 0,
                group_limit_bytes=end.group_limit_bytes if end else None,
                recipe=spec.recipe,
                processes=spec.processes,
            ),
        )
        for rank, end in ends.items()
    ]


def _statuses(launched: Launched, rank: int, end: End | None) -> tuple[dict[str, Any], ...]:
    """Of a node without a last word, those of its last beat."""
    beat = launched.beats.get(rank)
    return tuple(end.statuses if end else beat.statuses if beat else ())


def _whole(
    spec: Spec,
    nodes: Sequence[NodeFacts],
    ended: process.Ended,
    timeout: float | None,
    finished: Result | None,
) -> outcome.Facts:
    stopped = [node.end.stopped for node in nodes if node.end and node.end.stopped]
    if ended.stopped == "interrupted":
        why = "interrupted"
    else:
        late = ended.stopped == "timeout" or "timeout" in stopped
        why = "timeout" if late else None
    first = nodes[0].facts
    return outcome.Facts(
        exit_code=first.exit_code,
        signal=first.signal,
        stopped=why,
        timeout_seconds=timeout,
        result=finished.status if finished else None,
        result_reason=finished.reason if finished else None,
        result_way_out=finished.way_out if finished else None,
        failures=tuple(f for node in nodes for f in node.facts.failures),
        statuses=tuple(s for node in nodes for s in node.facts.statuses),
        log="\n".join(node.facts.log for node in nodes),
        recipe=spec.recipe,
        processes=spec.processes,
    )


def _port_taken(spec: Spec, launched: Launched, ends: dict[int, End | None]) -> bool:
    nodes = node_facts(spec, launched, ends)
    return _finished(launched) is None and outcome.retryable(
        outcome.Facts(
            failures=tuple(f for node in nodes for f in node.facts.failures),
            statuses=tuple(s for node in nodes for s in node.facts.statuses),
            log="\n".join(node.facts.log for node in nodes),
        )
    )


def _row(
    resolved: Resolved,
    launched: Launched,
    ends: dict[int, End | None],
    ended: process.Ended,
    place: Place,
) -> Result:
    """The worker's own result, or a row that says how far it came."""
    spec, finished = resolved.spec, _finished(launched)
    there = [launched.ready[rank] for rank in sorted(launched.ready)]
    if finished:
        differ = preflight.mixed(there)
        if differ and finished.status is Status.OK:
            finished.status, finished.reason = Status.VOID, f"{differ}: no comparable times"
            finished.way_out = "give it nodes of one kind"
        return finished
    nodes = node_facts(spec, launched, ends)
    whole = _whole(spec, nodes, ended, launched.order.timeout, None)
    ended_by = _refused(launched) or classify_nodes(
        whole, nodes, place.said(launched.folder), launched.order.silence
    )
    return launch.unfinished(resolved, launched.folder, whole, ended_by)


def _refused(launched: Launched) -> outcome.Outcome | None:
    """Why the nodes did not begin."""
    if launched.go is None:
        gone = [r for r in range(launched.order.nodes) if r not in launched.ready]
        if not gone:
            return None
        named = ", ".join(f"node {rank}" for rank in gone)
        reason = f"{named} of {launched.order.nodes} gave no sign before the start"
        return outcome.Outcome(Status.NODE_LOST, reason, "see supervisor.txt; is OUT shared?")
    if not launched.go.refused:
        return None
    reason, _, way_out = launched.go.refused.partition("; ")
    return outcome.Outcome(Status.UNSUPPORTED, reason, way_out or "see docs/cluster.md")


def _launch_record(
    ended: process.Ended, ends: dict[int, End | None], launched: Launched
) -> LaunchRecord:
    """As of one machine, with the node that held most memory."""
    known = [end for end in ends.values() if end]
    fullest = max(known, key=lambda end: end.tree_peak_bytes, default=None)
    first = ends.get(0)
    return LaunchRecord(
        exit_code=(first.exit_code if first.signal is None else -first.signal) if first else None,
        wall_seconds=ended.wall_seconds,
        tree_peak_bytes=(fullest.tree_peak_bytes or None) if fullest else None,
        tree_processes=(fullest.tree_processes or None) if fullest else None,
        killed=any(end.stopped for end in known) or len(known) < len(ends),
        port=launched.go.port if launched.go else None,
        others=[pid for end in known for pid in end.others],
    )


def _notes(launched: Launched, place: Place) -> list[str]:
    pairs = [(ready, launched.seen[rank]) for rank, ready in launched.ready.items()]
    return [*place.notes, *preflight.skews(pairs)]


def _keep(here: Path, folder: Path, nodes: int) -> None:
    """The logs of all nodes as one, and what the run recorded, where a run leaves them; the
    launch's folder stays only where a node may still write there."""
    with contextlib.suppress(OSError), (folder / "log.txt").open("w", encoding="utf-8") as stream:
        for rank in range(nodes):
            stream.write(f"==== node {rank} ====\n{launch.read_log(here / log_of(rank))}\n")
    for name in recordings.left_in(here):
        with contextlib.suppress(OSError):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(here / name, folder / name)

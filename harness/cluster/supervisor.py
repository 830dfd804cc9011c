"""One node's part of a launch: start it, watch it, end it in bounded time, and write how it ended.

A process group's timeout does not bound every engine: DeepSpeed's own groups are made without one,
and wait for ever. So the bound comes from here, by signs that need no rank's help: a node that
writes no more, a head that cannot be reached, ranks that take no step.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.cluster import network, preflight
from harness.cluster.meeting import Beat, End, Go, Order, Ready, log_of, read, write
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
from harness.phases import RUN_PHASES
from harness.system import machine, process, tree
from strategies.base import Reason
from strategies.files import check_own_folder, lock_file

Tick = Callable[[], None]

READY_SECONDS = 120.0
"""Time for all nodes to become ready; each compiles its ops before."""
POLL_SECONDS = 0.1
BEAT_SECONDS = 2.0
"""Between two beats: one small file a node on the shared file system."""
PROBE_SECONDS = 5.0
GRACE_SECONDS = 10.0
"""Time for ranks to end by themselves after another node's part: their own error says more."""


def serve(folder: Path, rank: int, tick: Tick = lambda: None) -> End | None:
    """Run this node's part of the launch in ``folder``; None if the leader does not let it begin.
    ``tick`` is called a few times a second.

    Raises:
        process.Interrupted: a signal came; the part has ended, and the end file says so.
    """
    door = network.Door()

    def tend() -> None:
        door.answer()
        tick()

    with contextlib.closing(door):
        order = _await(lambda: read(folder, Order), READY_SECONDS, tend)
        if order is None:
            return None
        ready = _ready(order, folder, rank, door, tend)
        write(folder, ready, rank)
        go = _await(lambda: read(folder, Go, token=order.token), READY_SECONDS, tend)
        if go is None or go.refused:
            return None
        with own_folder(order.token, rank) as local:
            sentry = Sentry(order, go, folder, rank, local, door)
            return _run(sentry, ready, tick)


def _await(look: Callable[[], Any], seconds: float, tend: Tick) -> Any:
    """Call ``look`` until it returns a value, at most ``seconds``; return the value or None."""
    deadline = time.monotonic() + seconds
    while (found := look()) is None and time.monotonic() < deadline:
        tend()
        time.sleep(POLL_SECONDS)
    return found


def _ready(order: Order, folder: Path, rank: int, door: network.Door, tend: Tick) -> Ready:
    """Return this node; all but the head connect to the head first."""
    ready = preflight.look(order, rank)
    if rank == 0:
        ready.door, ready.port = door.port, free_port()
        return ready
    head = _await(lambda: read(folder, Ready, 0, order.token), READY_SECONDS, tend)
    if head is None:
        unshared = Reason("it sees no file of node 0", "is the results folder shared?")
        ready.lack = ready.lack or unshared
        return ready
    hosts = [order.head, *head.addresses]
    way = _await(lambda: network.reach(hosts, head.door), 15.0, tend)
    if way:
        ready.reached, ready.address = way
    elif not ready.lack:
        text = f"it cannot reach node 0 ({head.host}) at {', '.join(hosts)}, port {head.door}"
        ready.lack = Reason(text, "open the network between them, or give --head ADDRESS")
    return ready


def _run(sentry: Sentry, ready: Ready, tick: Tick) -> End:
    order, go, local = sentry.order, sentry.go, sentry.local
    address = ready.address or go.head
    interface = os.environ.get("HEADROOM_INTERFACE") or network.interface_of(address) or "lo"
    kills, interrupted = machine.memory_kills(), None

    def both(tree_bytes: int) -> None:
        sentry.tick(tree_bytes)
        tick()

    try:
        ended = process.run_child(
            as_node(order.words, {RANK: str(ready.rank), HEAD: go.head, PORT: str(go.port)}),
            cwd=ROOT,
            env=inherited() | _environment(order, ready, interface, local),
            log=sentry.folder / log_of(ready.rank),
            timeout=order.timeout,
            on_tick=both,
            finished=sentry.finished,
            stop=sentry.stop,
            scratch=(local,),
        )
    except process.Interrupted as signalled:
        ended, interrupted = signalled.ended, signalled
    since = machine.memory_kills().since(kills)
    end = End(
        token=order.token,
        rank=ready.rank,
        host=ready.host,
        exit_code=ended.exit_code,
        signal=ended.signal,
        stopped=ended.stopped,
        lost=sentry.lost,
        tree_peak_bytes=ended.tree_peak_bytes,
        tree_processes=ended.tree_processes,
        survivors=ended.survivors,
        machine_kills=since.machine,
        group_kills=since.group,
        group_limit_bytes=since.limit_bytes,
        interface=interface,
        others=list(ended.others),
        statuses=sentry.statuses,
        failures=sentry.failures,
    )
    _write_end(sentry.folder, end)
    if interrupted:
        raise interrupted
    return end


def _environment(order: Order, ready: Ready, interface: str, local: Path) -> dict[str, str]:
    """Return the order's variables with this node's own: cores, interface, folders."""
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


def _write_end(folder: Path, end: End) -> None:
    """Write the end file; retry for a while if the folder is gone or full."""
    for left in reversed(range(5)):
        try:
            write(folder, end, end.rank, durable=True)
            return
        except OSError:
            time.sleep(1.0 if left else 0.0)


# ---- this node's own disk ----

LOCK = ".alive"


@contextlib.contextmanager
def own_folder(token: str, rank: int) -> Iterator[Path]:
    """Return a launch's folder on this node's disk, for statuses, caches and swap files.
    HEADROOM_SCRATCH names another disk, such as a fast NVMe.

    This process locks it and removes it at the end. Unlocked folders, which a power cut or a
    scheduler's kill left here, are removed first.
    """
    root = Path(os.environ.get("HEADROOM_SCRATCH") or tempfile.gettempdir())
    mine = f"headroom-{os.getuid()}"
    for old in root.glob(f"{mine}-{'[0-9a-f]' * 12}-*"):
        with contextlib.suppress(OSError):
            check_own_folder(old)
            with _locked(old):
                shutil.rmtree(old, ignore_errors=True)
    folder = root / f"{mine}-{token}-{rank}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_own_folder(folder)
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold ``folder``; raises OSError if another process does, or it is gone."""
    with lock_file(folder / LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


# ---- when to end from outside ----

STEPS = 20
"""Median steps during which ranks may take none."""
PHASES = tuple(RUN_PHASES)
STEPPING = PHASES[PHASES.index("memory") : PHASES.index("measure") + 1]
"""Phases of steps that follow one another. Before, a compiler or a first batch may take minutes,
and the deadline is the bound."""


def stop_reason(
    silence: float,
    *,
    quiet: Mapping[int, float],
    ended_badly: float | None = None,
    unreachable: float | None = None,
    unwritable: float | None = None,
    silent: bool = False,
) -> tuple[str, list[int]] | None:
    """Return why to end this node's part now, with the nodes that it is about; None to go on.

    The reasons: isolated (the shared folder cannot be written), unreachable (the head), lost
    (another node gives no sign), peer (another node's part has ended), silent (no rank takes a
    step).

    Args:
        silence: seconds without a sign after which a node is lost.
        quiet: node -> seconds since its last new beat, for nodes that have not ended.
        ended_badly: seconds since another node reported a failure.
        unreachable: seconds since the head last answered a probe, if it does not.
        unwritable: seconds since the last beat was written, if the next failed.
        silent: whether the own ranks take no step.
    """
    if (unwritable or 0.0) > silence / 2:
        return "isolated", []
    if (unreachable or 0.0) > silence:
        return "unreachable", [0]
    if lost := sorted(rank for rank, seconds in quiet.items() if seconds > silence):
        return "lost", lost
    if (ended_badly or 0.0) > GRACE_SECONDS:
        return "peer", []
    return ("silent", []) if silent else None


class Progress:
    """The steps of a node's ranks, by their statuses. ``now`` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.since = now, 0.0
        self.at: tuple[Any, ...] = ()
        self.gaps: list[float] = []

    def see(self, statuses: Sequence[Mapping[str, Any]]) -> None:
        """Note where the ranks are now."""
        places = tuple((s.get("rank"), s.get("phase"), s.get("step")) for s in statuses)
        if places == self.at:
            return
        if {place[1] for place in self.at} & {"warmup", *STEPPING}:
            self.gaps.append(self.now() - self.since)
        self.at, self.since = places, self.now()

    def silent(self, least: float) -> bool:
        """Return whether no step was taken for ``least`` seconds and for ``STEPS`` median steps.

        A median step is one between steps that follow one another.
        """
        if not self.at or not {str(place[1]) for place in self.at} <= set(STEPPING):
            return False
        usual = statistics.median(self.gaps) if self.gaps else 0.0
        return self.now() - self.since > max(least, STEPS * usual)


class Sentry:
    """The watch of one launch on one node. ``lost`` are the nodes that its last reason is about."""

    def __init__(
        self,
        order: Order,
        go: Go,
        folder: Path,
        rank: int,
        local: Path,
        door: network.Door,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.order, self.go, self.folder = order, go, folder
        self.rank, self.local, self.door, self.now = rank, local, door, now
        self.lost: list[int] = []
        self.progress = Progress(now)
        self.statuses: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []
        self._count = 0
        self._told = self._written = self._probed = now()
        self._unreachable: float | None = None
        self._bad: float | None = None
        others = [other for other in range(order.nodes) if other != rank]
        self._beats = dict.fromkeys(others, (-1, now()))
        """Other node that has not ended -> count and time of its last new beat."""
        self.tick(0)

    def tick(self, tree_bytes: int) -> None:
        """Read the own ranks' files; every 2 s write a beat and read the others'."""
        self.door.answer()
        self.statuses = list(launch.rank_files(self.local, "status")) or self.statuses
        self.failures = list(launch.rank_files(self.local, "failure")) or self.failures
        self.progress.see(self.statuses)
        if self._count == 0 or self.now() - self._told >= BEAT_SECONDS:
            self._told = self.now()
            self._write(tree_bytes)
            self._read()
        if self.rank and self.now() - self._probed >= PROBE_SECONDS:
            self._probe()

    def finished(self) -> bool:
        """Return whether the result is written or a rank of this node has failed."""
        return bool(self.failures) or (self.folder / "result.json").exists()

    def stop(self) -> str | None:
        """Return why this node's part has to end now (``stop_reason``); None to go on."""
        away = self._told > self._written
        if not away and (self.folder / "result.json").exists():
            return None  # all is done: run_child ends what lingers
        reason = self._reason(away)
        if reason and reason[0] in ("silent", "peer") and self.rank:
            self._probe()  # the cause may be a link that is down
            reason = reason if self._unreachable is None else ("unreachable", [0])
        if reason is None:
            return None
        self.lost = reason[1]
        return reason[0]

    def _reason(self, away: bool) -> tuple[str, list[int]] | None:
        def age(at: float | None) -> float | None:
            return None if at is None else self.now() - at

        return stop_reason(
            self.order.silence,
            quiet={rank: self.now() - at for rank, (_, at) in self._beats.items()},
            ended_badly=age(self._bad),
            unreachable=age(self._unreachable),
            unwritable=age(self._written) if away else None,
            silent=self.progress.silent(self.order.silence),
        )

    def _write(self, tree_bytes: int) -> None:
        self._count += 1
        beat = Beat(
            token=self.order.token,
            rank=self.rank,
            count=self._count,
            statuses=self.statuses,
            failed=bool(self.failures),
            tree_bytes=tree_bytes,
        )
        with contextlib.suppress(OSError):  # its duration is a sign of its own
            write(self.folder, beat, self.rank)
            self._written = self._told

    def _read(self) -> None:
        """Read the others' files; a beat is new when its counter has changed."""
        for other, (count, _) in list(self._beats.items()):
            end = read(self.folder, End, other, self.order.token)
            beat = None if end else read(self.folder, Beat, other, self.order.token)
            if end is not None:
                del self._beats[other]
            elif beat is not None and beat.count != count:
                self._beats[other] = (beat.count, self.now())
            if (end and not end.well) or (beat and beat.failed):
                self._bad = self.now() if self._bad is None else self._bad

    def _probe(self) -> None:
        """Connect to the head: without that link every rank hangs, even if files are shared."""
        self._probed = self.now()
        if network.answers(self.go.head, self.go.door, seconds=1.0):
            self._unreachable = None
        elif self._unreachable is None:
            self._unreachable = self.now()

"""A launch on several nodes as its leader sees it: the order, the go, and what the nodes say."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.launch import launch, outcome
from harness.launch.command import inherited
from harness.nodes import preflight
from harness.nodes.files import Beat, End, Go, Order, Ready, read, write
from harness.nodes.place import Place
from harness.result import NodeRecord
from harness.system import kernel, process

__all__ = ["END_SECONDS", "Launched", "make_order", "start"]

MARGIN_SECONDS = 300.0
"""Beyond the row's deadline, which the supervisors keep: for them to meet, to compile, to end."""
END_SECONDS = 20.0
"""For the other nodes' last words once the own part has ended."""
STATUS_SECONDS = 0.5


class Launched:
    """A launch as the leader sees it: it lets the nodes begin, and collects what they say."""

    def __init__(self, order: Order, folder: Path, on_status: launch.OnStatus) -> None:
        self.order, self.folder, self.on_status = order, folder, on_status
        self.ready: dict[int, Ready] = {}
        self.seen: dict[int, float] = {}
        self.go: Go | None = None
        self.beats: dict[int, Beat] = {}
        self.began = time.monotonic()
        self._last = -STATUS_SECONDS

    def tick(self, tree_bytes: int) -> None:
        """A few times a second, while the supervisors run."""
        elapsed = time.monotonic() - self.began
        if elapsed - self._last < STATUS_SECONDS:
            return
        self._last = elapsed
        self.look()
        if self.go is None:
            self.meet()
        self.on_status(self._status(elapsed))

    def look(self) -> None:
        """Read what the nodes have said."""
        self.go = self.go or read(self.folder, Go, token=self.order.token)
        for rank in range(self.order.nodes):
            if rank not in self.ready:
                ready = read(self.folder, Ready, rank, self.order.token)
                if ready is not None:
                    self.ready[rank], self.seen[rank] = ready, time.time()
            beat = read(self.folder, Beat, rank, self.order.token)
            if beat is not None:
                self.beats[rank] = beat

    def meet(self) -> None:
        """Let them begin once all are ready and alike; or say why not."""
        there = [self.ready[rank] for rank in sorted(self.ready)]
        lacking = next((r for r in there if r.lack), None)
        if lacking is None and len(there) < self.order.nodes:
            return
        refused = preflight.disagreement(self.order, [lacking] if lacking else there)
        go = Go(token=self.order.token, refused=refused)
        if not refused:
            go.head = preflight.head_address(there)
            go.door, go.port = there[0].door, there[0].port
        write(self.folder, go)
        self.go = go

    def _status(self, elapsed: float) -> dict[str, Any]:
        statuses = tuple(s for beat in self.beats.values() for s in beat.statuses)
        phase, step = outcome.where(outcome.Facts(statuses=statuses))
        of = [s.get("of") or 0 for s in statuses if s.get("phase") == phase]
        sizes = [beat.tree_bytes for beat in self.beats.values()]
        return {
            "phase": phase,
            "step": step,
            "of": max(of, default=0),
            "peak_bytes": launch.peak(statuses),
            "tree_bytes": max(sizes, default=0),
            "elapsed_seconds": elapsed,
        }

    def ends(self, seconds: float = END_SECONDS) -> dict[int, End | None]:
        """Each node's last word, waited for so long."""
        deadline = time.monotonic() + seconds
        while True:
            found = {
                rank: read(self.folder, End, rank, self.order.token)
                for rank in range(self.order.nodes)
            }
            if all(found.values()) or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def records(self, ends: dict[int, End | None]) -> list[NodeRecord]:
        """What a result keeps of its nodes."""
        return [_record_of(self.ready.get(rank), end, rank) for rank, end in ends.items()]


def _record_of(ready: Ready | None, end: End | None, rank: int) -> NodeRecord:
    known = ready or Ready(token="", rank=rank, host=end.host if end else "")
    record = NodeRecord(
        rank=rank,
        host=known.host,
        cores=known.cores,
        memory_bytes=known.memory_bytes,
        devices=known.devices,
        driver=known.driver,
        address=known.address,
        answered=end is not None,
    )
    if end is not None:
        record.exit_code = end.exit_code if end.signal is None else -end.signal
        record.stopped, record.survivors = end.stopped, end.survivors
        record.tree_peak_bytes = end.tree_peak_bytes or None
        record.interface = end.interface
    return record


# ---- orders ----


def make_order(
    place: Place,
    out: Path,
    *,
    words: Sequence[str],
    environment: dict[str, str],
    processes: int,
    timeout: float | None,
    ops: Sequence[str] = (),
) -> Order:
    """An order to all nodes of ``place``, with a token of its own."""
    return Order(
        token=uuid.uuid4().hex[:12],
        nodes=place.nodes,
        processes=processes,
        head=place.head,
        words=list(words),
        environment=environment,
        out=str(out),
        timeout=timeout,
        silence=place.silence,
        code=preflight.code(),
        versions=preflight.versions(),
        cpu=kernel.cpu_name(),
        ops=sorted(ops),
    )


def start(
    order: Order, folder: Path, place: Place, on_status: launch.OnStatus = lambda status: None
) -> tuple[Launched, process.Ended]:
    """Have all nodes carry out ``order`` in ``folder``, to its end.

    Raises:
        process.Interrupted: a signal came; all that this machine started has ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    launched = Launched(order, folder, on_status)
    write(folder, order, durable=True)
    with place.published(folder):
        ended = process.run_child(
            place.words(folder),
            cwd=ROOT,
            env=inherited(),
            log=folder / "supervisor.txt",
            timeout=None if order.timeout is None else order.timeout + MARGIN_SECONDS,
            on_tick=launched.tick,
        )
    return launched, ended

"""What a supervisor sees while its part of a row runs, and what it tells: one file every 2 s."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.json_files import BadFile, read_json
from harness.nodes import network
from harness.nodes.files import Beat, End, Go, Order, read, write
from harness.nodes.watch import BEAT_SECONDS, Progress, Signs, stop_word

__all__ = ["Sentry", "rank_files"]

PROBE_SECONDS = 5.0
ASKING = ("silent", "peer")
"""Reasons to end behind which a link may be that is gone."""


def rank_files(folder: Path, kind: str) -> list[dict[str, Any]]:
    """What the ranks of this node wrote of themselves, in the order of ranks; a file half there or
    gone is left out."""
    records = []
    for path in (folder / "ranks").glob(f"rank*.{kind}.json"):
        with contextlib.suppress(BadFile):
            records.append(read_json(path, dict[str, Any]))
    return sorted(records, key=lambda data: data.get("rank") or 0)


class Sentry:
    """One launch's watch on one node. ``lost`` are the nodes that its last word speaks of."""

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
        self._ended: dict[int, End] = {}
        others = [other for other in range(order.nodes) if other != rank]
        self._heard: dict[int, tuple[int, float]] = {other: (-1, now()) for other in others}
        self.tick(0)

    def tick(self, tree_bytes: int) -> None:
        """A few times a second: look at the own ranks; every 2 s tell and hear."""
        self.door.answer()
        self.statuses = rank_files(self.local, "status") or self.statuses
        self.failures = rank_files(self.local, "failure") or self.failures
        self.progress.see(self.statuses)
        if self._count == 0 or self.now() - self._told >= BEAT_SECONDS:
            self._told = self.now()
            self._tell(tree_bytes)
            self._hear()
        if self.rank and self.now() - self._probed >= PROBE_SECONDS:
            self._probe()

    def finished(self) -> bool:
        """Whether the result is written or a rank here has failed: the rest adds nothing."""
        return bool(self.failures) or (self.folder / "result.json").exists()

    def stop(self) -> str | None:
        """Why this node's part has to end now (``harness.nodes.watch``)."""
        if not self._away() and (self.folder / "result.json").exists():
            return None  # all is done: what lingers is ended by run_child
        word = stop_word(self._signs(), self.order.silence)
        if word and word[0] in ASKING and self.rank:
            self._probe()  # before it is said that all are there
            word = ("unreachable", [0]) if self._unreachable is not None else word
        if word is None:
            return None
        self.lost = word[1]
        return word[0]

    def _signs(self) -> Signs:
        now = self.now()
        quiet = {r: now - t for r, (_, t) in self._heard.items() if r not in self._ended}
        since = {
            "ended_badly": self._bad,
            "unreachable": self._unreachable,
            "unwritable": self._written if self._away() else None,
        }
        ages = {name: None if at is None else now - at for name, at in since.items()}
        return Signs(quiet=quiet, silent=self.progress.silent_for(self.order.silence), **ages)

    def _away(self) -> bool:
        """Whether the shared folder did not take the last word."""
        return self._told > self._written

    def _tell(self, tree_bytes: int) -> None:
        self._count += 1
        beat = Beat(
            token=self.order.token,
            rank=self.rank,
            count=self._count,
            statuses=self.statuses,
            failed=bool(self.failures),
            tree_bytes=tree_bytes,
        )
        try:
            write(self.folder, beat, self.rank)
            self._written = self._told
        except OSError:
            pass  # how long it does so is a sign of its own

    def _hear(self) -> None:
        """The others' words; each counts as new when its counter has changed."""
        bad = False
        for other, (count, _) in self._heard.items():
            end = self._ended.get(other) or read(self.folder, End, other, self.order.token)
            if end is not None:
                self._ended[other] = end
                bad = bad or not end.well
                continue
            beat = read(self.folder, Beat, other, self.order.token)
            if beat is not None and beat.count != count:
                self._heard[other] = (beat.count, self.now())
            bad = bad or (beat is not None and beat.failed)
        if bad and self._bad is None:
            self._bad = self.now()

    def _probe(self) -> None:
        """Knock at the head: a link that is gone leaves its files where they are shared by another
        way, and hangs every rank."""
        self._probed = self.now()
        if network.answers(self.go.head, self.go.door, seconds=1.0):
            self._unreachable = None
        elif self._unreachable is None:
            self._unreachable = self.now()

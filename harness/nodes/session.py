"""How a command that was started on every node becomes one: node 0 leads, the others follow.

They meet in OUT/nodes. A follower says hello in a file of its own that changes as long as it lives;
the leader answers the one that lives now by its name, so that files of an earlier run mislead
nobody. Then the leader points at one launch's folder after another, and says when all is done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.json_files import BadFile, read_json, write_json
from harness.nodes import supervisor
from strategies.base import BadInput

__all__ = ["LeaderLost", "MeetingError", "Session", "follow"]

MEET_SECONDS = 300.0
"""For all nodes to start the command; images are pulled and file systems mounted meanwhile."""
POLL_SECONDS = 0.2
WORD_SECONDS = 2.0


class MeetingError(BadInput):
    """Nodes that did not meet: who is missing, and what to look at."""


class LeaderLost(BadInput):
    """A follower whose leader gives no sign any more."""


@dataclass(kw_only=True)
class Word:
    """The leader's file. ``members``: node -> the name of its follower; ``order``: the folder of
    the launch to take part in, counted by ``number``; ``count`` grows as long as it lives."""

    leader: str
    count: int = 0
    members: dict[str, str] = field(default_factory=dict)
    number: int = 0
    order: str = ""
    closed: bool = False


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, dict[str, Any])
    except BadFile:
        return {}


class Session:
    """The leader's side: a word every 2 s from a thread, while rows run and between them."""

    def __init__(self, out: Path, nodes: int) -> None:
        self.folder, self.nodes = out / "nodes", nodes
        self.word = Word(leader=uuid.uuid4().hex)
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._speak, daemon=True)

    @contextlib.contextmanager
    def open(self, say: Callable[[str], None], seconds: float = MEET_SECONDS) -> Iterator[None]:
        """All nodes have met; at the end they are sent home.

        Raises:
            MeetingError: some did not come.
        """
        self._thread.start()
        try:
            self._meet(say, seconds)
            yield
        finally:
            self._change(closed=True)
            self._over.set()
            self._thread.join()

    @contextlib.contextmanager
    def published(self, folder: Path) -> Iterator[None]:
        """Have all followers take part in the launch of ``folder``."""
        self._change(order=str(folder), number=self.word.number + 1)
        yield

    def _meet(self, say: Callable[[str], None], seconds: float) -> None:
        first: dict[int, tuple[Any, Any]] = {}
        deadline, told = time.monotonic() + seconds, False
        wanted = set(range(1, self.nodes))
        while {int(rank) for rank in self.word.members} != wanted:
            for rank in wanted:
                hello = _read(self.folder / f"hello{rank}.json")
                now = (hello.get("name"), hello.get("count"))
                alive = rank in first and first[rank][0] == now[0] and first[rank][1] != now[1]
                if alive:  # it has changed since we began: not an earlier run's
                    self._change(members={**self.word.members, str(rank): now[0]})
                elif now[0]:
                    first.setdefault(rank, now)
                    first[rank] = now if first[rank][0] != now[0] else first[rank]
            missing = sorted(wanted - {int(rank) for rank in self.word.members})
            if missing and time.monotonic() > deadline:
                raise MeetingError(self._missing(missing, seconds))
            if missing and not told and time.monotonic() > deadline - seconds + 5:
                say(f"waiting for node {', '.join(map(str, missing))} of {self.nodes}")
                told = True
            time.sleep(POLL_SECONDS)

    def _missing(self, missing: list[int], seconds: float) -> str:
        names = ", ".join(f"node {rank}" for rank in missing)
        return (
            f"{names} of {self.nodes} gave no sign in {self.folder} for {seconds:g} s; start the "
            "same command on every node, with an --out on a file system that they share"
        )

    def _change(self, **new: Any) -> None:
        with self._lock:
            self.word = dataclasses.replace(self.word, **new)
        self._write()

    def _speak(self) -> None:
        while not self._over.wait(WORD_SECONDS):
            self._write()

    def _write(self) -> None:
        with self._lock:
            self.word.count += 1
            # A full or slow disk is seen by the rows, and silence by the followers.
            with contextlib.suppress(OSError):
                write_json(self.folder / "session.json", vars(self.word), durable=False)


def follow(
    out: Path, rank: int, silence: float, say: Callable[[str], None], seconds: float = MEET_SECONDS
) -> int:
    """Another node's side: take part in every launch that the leader names, until it says that
    all is done. Returns how many.

    Raises:
        MeetingError: no leader answered. LeaderLost: it gives no sign any more.
    """
    folder, name = out / "nodes", uuid.uuid4().hex
    hello = _Hello(folder, rank, name)
    leader = _Leader(folder, rank, name)
    deadline, done = time.monotonic() + seconds, 0
    while True:
        hello.say()
        word = leader.heard()
        if word is None and leader.silent_for() > silence and leader.known:
            raise LeaderLost(f"node 0 gave no sign for {silence:g} s: this node ends too")
        if not leader.known and time.monotonic() > deadline:
            raise MeetingError(
                f"node {rank} was not called by node 0 in {folder} for {seconds:g} s; start the "
                "same command on every node, with an --out on a file system that they share"
            )
        if word is not None and word.closed:
            return done
        if word is not None and word.number > done:
            done = word.number
            say(f"node {rank}: {Path(word.order).parent.name}")
            supervisor.serve(Path(word.order), rank)
            leader.refresh()
        time.sleep(POLL_SECONDS)


class _Hello:
    """A follower's file, which changes as long as it lives."""

    def __init__(self, folder: Path, rank: int, name: str) -> None:
        self.path, self.name, self.count, self.last = folder / f"hello{rank}.json", name, 0, 0.0

    def say(self) -> None:
        """Again, if it is time."""
        if time.monotonic() - self.last < 1.0:
            return
        self.count, self.last = self.count + 1, time.monotonic()
        with contextlib.suppress(OSError):
            write_json(self.path, {"name": self.name, "count": self.count}, durable=False)


class _Leader:
    """What a follower hears of the leader that calls it by its name."""

    def __init__(self, folder: Path, rank: int, name: str) -> None:
        self.path, self.rank, self.name = folder / "session.json", str(rank), name
        self.known, self._last = False, (-1, time.monotonic())

    def heard(self) -> Word | None:
        """The leader's word where it is a new one, else None."""
        data = _read(self.path)
        if (data.get("members") or {}).get(self.rank) != self.name:
            return None
        self.known = True
        if data["count"] == self._last[0]:
            return None
        self._last = (data["count"], time.monotonic())
        return Word(**data)

    def refresh(self) -> None:
        """Nothing was heard while a row ran: only now does the clock of silence begin."""
        self._last = (self._last[0], time.monotonic())

    def silent_for(self) -> float:
        """Seconds since the last new word."""
        return time.monotonic() - self._last[1]

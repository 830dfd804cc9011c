"""What leader and supervisors tell each other: small JSON files in a folder that all nodes share.

One writer a file, replaced atomically, and opened by name: over NFS a listing may be a minute old.
A file counts if it carries the token of its launch. Nobody compares clocks of two machines.

A launch's folder holds order.json (the leader's: what to run), nodeR.ready.json (each supervisor's:
what it has), go.json (the leader's: begin, or why not), nodeR.beat.json (while it runs),
nodeR.end.json (how it ended) and log.nodeR.txt.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from harness.json_files import BadFile, read_json, write_json

__all__ = ["Beat", "End", "Go", "Order", "Ready", "log_of", "name_of", "read", "write"]

Kind = TypeVar("Kind")


@dataclass(kw_only=True)
class Order:
    """What every node runs: ``words`` and ``environment`` with places for what is a node's own
    (``harness.launch.command.as_node``).

    ``processes`` are those of one node. ``timeout`` counts from the go, in seconds; ``silence`` is
    how long a node may give no sign before it counts as lost. ``ops`` are to be compiled first.
    ``cpu`` is the head's processor: another one's compiled ops are kept apart. ``code`` and
    ``versions`` are the leader's, which all must have.
    """

    token: str
    nodes: int
    processes: int
    head: str
    words: list[str]
    environment: dict[str, str]
    out: str
    timeout: float | None
    silence: float
    code: str
    versions: dict[str, str | None]
    cpu: str
    ops: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Ready:
    """A node before it begins. ``lack`` is why it cannot, with the way out behind "; ".

    ``door`` and ``port`` are the head's: where others knock, and where the ranks will meet;
    ``reached`` and ``address`` are another node's: the head's address as seen from it, and its own.
    ``written`` is this node's clock.
    """

    token: str
    rank: int
    host: str
    lack: str = ""
    cores: int = 0
    memory_bytes: int = 0
    devices: list[str] = field(default_factory=list)
    driver: str = ""
    cpu: str = ""
    code: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    addresses: list[str] = field(default_factory=list)
    door: int = 0
    port: int = 0
    reached: str = ""
    address: str = ""
    written: float = 0.0


@dataclass(kw_only=True)
class Go:
    """The leader's word: begin, with the head's address; or ``refused``, why not."""

    token: str
    head: str = ""
    door: int = 0
    port: int = 0
    refused: str = ""


@dataclass(kw_only=True)
class Beat:
    """A node that runs: ``count`` grows. ``statuses`` are its ranks' own, ``failed`` whether one
    of them has failed."""

    token: str
    rank: int
    count: int
    statuses: list[dict[str, Any]] = field(default_factory=list)
    failed: bool = False
    tree_bytes: int = 0


@dataclass(kw_only=True)
class End:
    """How a node's part ended; fields as in ``harness.system.process.Ended`` and
    ``harness.launch.outcome.Facts``. ``stopped`` may be a word of ``harness.nodes.watch`` too, and
    ``lost`` names the nodes that it speaks of."""

    token: str
    rank: int
    host: str
    exit_code: int | None = None
    signal: int | None = None
    stopped: str | None = None
    lost: list[int] = field(default_factory=list)
    wall_seconds: float = 0.0
    tree_peak_bytes: int = 0
    tree_processes: int = 0
    survivors: int = 0
    machine_kills: int = 0
    group_kills: int = 0
    group_limit_bytes: int | None = None
    interface: str = ""
    others: list[int] = field(default_factory=list)
    statuses: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether its processes ended by themselves, and none has failed."""
        return self.exit_code == 0 and self.stopped is None and not self.failures


NAMES = {Ready: "ready", Beat: "beat", End: "end"}


def name_of(kind: type, rank: int | None = None) -> str:
    """The file of ``kind``: one a launch, or one a node."""
    if rank is None:
        return f"{kind.__name__.lower()}.json"
    return f"node{rank}.{NAMES[kind]}.json"


def log_of(rank: int) -> str:
    """The file of what a node's processes printed."""
    return f"log.node{rank}.txt"


def write(folder: Path, item: Any, rank: int | None = None, *, durable: bool = False) -> None:
    """Put ``item`` in its file below ``folder``."""
    write_json(folder / name_of(type(item), rank), dataclasses.asdict(item), durable=durable)


def read(folder: Path, kind: type[Kind], rank: int | None = None, token: str = "") -> Kind | None:
    """The file of ``kind``; None while it is not there, not whole, or of another launch."""
    try:
        item = read_json(folder / name_of(kind, rank), kind, name=kind.__name__)
    except BadFile:
        return None
    return item if not token or item.token == token else None

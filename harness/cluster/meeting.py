"""Messages between nodes: rank and head of each node, the leader's session, and their files.

All files lie on the file system that the nodes share. Each has one writer, is replaced atomically
and opened by name, because a listing over NFS may be a minute old. A message counts if it carries
the token of its launch. Times of two machines are never compared.

A launch's folder holds order.json and go.json from the leader; from each node R nodeR.ready.json,
nodeR.beat.json while it runs, nodeR.end.json and log.nodeR.txt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from harness.json_files import BadFile, read_json, write_json
from strategies.base import BadInput, Reason

MEET_SECONDS = 300.0
"""Time for all nodes to start the command, while images are pulled and file systems mounted."""
POLL_SECONDS = 0.2
WORD_SECONDS = 2.0
Kind = TypeVar("Kind")


# ---- which machine this is ----

STARTERS = {
    "Slurm (srun)": ("SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST"),
    "dstack": ("DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP"),
    "SkyPilot": ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
    "Kubernetes (PET_)": ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR"),
    "the environment": ("NODE_RANK", "NNODES", "MASTER_ADDR"),
}
"""Starter of one command a node -> its variables for rank, number of nodes and head, in the order
in which they are looked up."""
TYPE = (
    "start the same command on each node with --node-rank R --head ADDRESS, or inside a Slurm job "
    "(salloc, sbatch), or see docs/how-to/cluster.md"
)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """This machine: ``rank`` of ``nodes``, with the name or address of rank 0 as ``head``.

    ``rank`` is None in a Slurm job of so many nodes that has not started the command on each.
    """

    nodes: int
    rank: int | None
    head: str
    starter: str


def find(
    environ: Mapping[str, str], nodes: int, rank: int | None = None, head: str | None = None
) -> Allocation:
    """Return this machine among ``nodes``, by ``rank`` and ``head`` if they are given, else by
    variables.

    Raises:
        BadInput: no rank is given, or another number of machines.
    """
    if rank is not None or head is not None:
        return _by_hand(nodes, rank, head)
    for starter, names in STARTERS.items():
        own, there = (_number(environ.get(name)) for name in names[:2])
        if own is None or there is None or (there == 1 and nodes > 1):
            continue  # an interactive step of one node may lie in a job of more
        return _by_starter(starter, nodes, there, own, first_host(environ.get(names[2], "")))
    if "SLURM_JOB_ID" not in environ:
        raise BadInput(f"nodes is {nodes}, but no variable has this machine's rank; {TYPE}")
    there = _number(environ.get("SLURM_JOB_NUM_NODES"))
    if there is None or there < nodes:
        job = f"Slurm job {environ['SLURM_JOB_ID']} has {there or 'an unknown number'}"
        raise BadInput(f"nodes is {nodes}, and {job}; allocate with --nodes={nodes}")
    return Allocation(nodes=nodes, rank=None, head="", starter="Slurm job")


def first_host(hosts: str) -> str:
    """Return the first of a list as schedulers write it: ``n[01-04,7]``, ``a,b``, or one a line."""
    return re.split(r"[\s,]", re.sub(r"\[(\w+)[^\]]*\]", r"\1", hosts.strip()))[0]


def _number(text: str | None) -> int | None:
    """Return the number in ``2``, or the first in torchrun's ``2:4``."""
    number = (text or "").partition(":")[0]
    return int(number) if number.isdigit() else None


def _by_hand(nodes: int, rank: int | None, head: str | None) -> Allocation:
    if rank is None or not head:
        missing = "--node-rank R (0 on the head)" if rank is None else "--head ADDRESS"
        raise BadInput(f"nodes is {nodes}, and {missing} is missing; give both")
    if not 0 <= rank < nodes:
        raise BadInput(
            f"node_rank is {rank}; give --node-rank 0 to {nodes - 1}, because there are "
            f"{nodes} nodes"
        )
    return Allocation(nodes=nodes, rank=rank, head=head, starter="by hand")


def _by_starter(starter: str, nodes: int, there: int, rank: int, head: str) -> Allocation:
    if there != nodes or not rank < there:
        raise BadInput(
            f"nodes is {nodes}, and {starter} started the command on {there} "
            f"({STARTERS[starter][1]}); give --nodes {there}"
        )
    if not head:
        variable = STARTERS[starter][2]
        raise BadInput(f"{starter} does not name node 0 ({variable}); {TYPE}")
    return Allocation(nodes=nodes, rank=rank, head=head, starter=starter)


# ---- messages of one launch ----


@dataclass(kw_only=True)
class Order:
    """A launch. ``words`` and ``environment`` have places for each node's own values
    (``harness.launch.command.as_node``); ``processes`` are those of one node.

    ``timeout`` counts from the go, in seconds. A node without a sign for ``silence`` seconds is
    lost. ``ops`` are compiled first. Ops are kept apart for another processor than ``cpu``. All
    nodes must have ``code`` and ``versions``, which are the leader's.
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
    """A node before it begins. ``lack`` is why it cannot.

    The head opens ``door`` for probes and reserves ``port`` for the ranks. Another node gives the
    head's address as it ``reached`` it, and its own ``address`` on the way there.
    """

    token: str
    rank: int
    host: str
    lack: Reason | None = None
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


@dataclass(kw_only=True)
class Go:
    """The leader's permission to begin, with the head's address; or why it is ``refused``."""

    token: str
    head: str = ""
    door: int = 0
    port: int = 0
    refused: Reason | None = None


@dataclass(kw_only=True)
class Beat:
    """A node that runs: a growing ``count``, the statuses of its ranks, and whether one failed."""

    token: str
    rank: int
    count: int
    statuses: list[dict[str, Any]] = field(default_factory=list)
    failed: bool = False
    tree_bytes: int = 0


@dataclass(kw_only=True)
class End:
    """End of a node's part of a launch; fields as in ``harness.system.process.Ended`` and
    ``harness.launch.outcome.Facts``. ``stopped`` may be a reason of ``supervisor.stop_reason``, and
    ``lost`` holds the nodes that it is about."""

    token: str
    rank: int
    host: str
    exit_code: int | None = None
    signal: int | None = None
    stopped: str | None = None
    lost: list[int] = field(default_factory=list)
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
    def code(self) -> int | None:
        """The exit code; of a signal its number below 0."""
        return self.exit_code if self.signal is None else -self.signal

    @property
    def well(self) -> bool:
        """Return whether the node's processes ended by themselves without a failure."""
        return self.exit_code == 0 and self.stopped is None and not self.failures


def log_of(rank: int) -> str:
    """Return the file with the output of a node's processes."""
    return f"log.node{rank}.txt"


def _file(kind: type, rank: int | None) -> str:
    name = f"{kind.__name__.lower()}.json"
    return name if rank is None else f"node{rank}.{name}"


def write(folder: Path, item: Any, rank: int | None = None, *, durable: bool = False) -> None:
    """Put ``item`` in its file below ``folder``."""
    write_json(folder / _file(type(item), rank), dataclasses.asdict(item), durable=durable)


def read(folder: Path, kind: type[Kind], rank: int | None = None, token: str = "") -> Kind | None:
    """Return the message of ``kind``; None while it is absent, not whole, or of another launch."""
    try:
        item = read_json(folder / _file(kind, rank), kind, name=kind.__name__)
    except BadFile:
        return None
    return item if not token or item.token == token else None


# ---- one session of launches ----


@dataclass(kw_only=True)
class Word:
    """The leader's file. ``order`` is the folder of launch ``number``; ``count`` grows as long as
    the leader lives."""

    leader: str
    count: int = 0
    number: int = 0
    order: str = ""
    closed: bool = False


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, dict[str, Any])
    except BadFile:
        return {}


def _hello(out: Path, rank: int) -> Path:
    return out / "nodes" / f"hello{rank}.json"


class Session:
    """The leader's side: a thread writes its word every 2 s, during rows and between them.

    A follower answers the name of the leader that it sees. Names are random, so that an answer to
    an earlier leader does not count.
    """

    def __init__(self, out: Path, nodes: int) -> None:
        self.out, self.nodes = out, nodes
        self.word = Word(leader=uuid.uuid4().hex)
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._speak, daemon=True)

    @contextlib.contextmanager
    def open(self, say: Callable[[str], None], seconds: float = MEET_SECONDS) -> Iterator[None]:
        """Meet all nodes, and close the session at the end.

        Raises:
            BadInput: some did not come.
        """
        self._thread.start()
        try:
            self._meet(say, seconds)
            yield
        finally:
            self._change(closed=True)
            self._over.set()
            self._thread.join()

    def publish(self, folder: Path) -> None:
        """Have all followers take part in the launch of ``folder``."""
        self._change(order=str(folder), number=self.word.number + 1)

    def _meet(self, say: Callable[[str], None], seconds: float) -> None:
        self._write()
        missing, began, told = list(range(1, self.nodes)), time.monotonic(), False
        while True:
            name = self.word.leader
            missing = [r for r in missing if _json(_hello(self.out, r)).get("leader") != name]
            waited = time.monotonic() - began
            if not missing:
                return
            if waited > seconds:
                names = ", ".join(f"node {rank}" for rank in missing)
                raise BadInput(_not_met(f"{names} of {self.nodes} gave no sign", self.out))
            if waited > 5 and not told:
                say(f"waiting for node {', '.join(map(str, missing))} of {self.nodes}")
                told = True
            time.sleep(POLL_SECONDS)

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
            # Rows report a full disk, and followers a silent leader.
            with contextlib.suppress(OSError):
                write_json(self.out / "nodes" / "session.json", vars(self.word), durable=False)


def _not_met(what: str, out: Path) -> str:
    return (
        f"{what} in {out / 'nodes'}; start the same command on every node, with an --out on a file "
        "system that they share"
    )


def follow(
    out: Path,
    rank: int,
    silence: float,
    serve: Callable[[Path], object],
    seconds: float = MEET_SECONDS,
) -> int:
    """Another node's side: ``serve`` each launch that the leader publishes, until it closes the
    session. Returns the number of launches.

    Raises:
        BadInput: no leader lives, or it gives no sign any more.
    """
    seen, alive, served, count = Word(leader=""), False, 0, 0
    began = last = time.monotonic()
    while True:
        data = _json(out / "nodes" / "session.json")
        word = Word(**data) if data else seen
        if word.leader != seen.leader:  # perhaps an earlier one: it lives once its count grows
            write_json(_hello(out, rank), {"leader": word.leader}, durable=False)
            alive, served = False, word.number
        elif word.count != seen.count:
            alive, last = True, time.monotonic()
        seen = word
        if alive and word.number > served:
            served, count = word.number, count + 1
            serve(Path(word.order))
            last = time.monotonic()  # nothing was read meanwhile
        elif alive and word.closed:
            return count
        elif alive and time.monotonic() - last > silence:
            raise BadInput(f"node 0 gave no sign for {silence:g} s: this node stops too")
        elif not alive and time.monotonic() - began > seconds:
            raise BadInput(_not_met(f"node {rank} found no living node 0", out))
        time.sleep(POLL_SECONDS)

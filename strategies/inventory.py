"""What an engine tells of a run: what a rank holds, what makes it, and what its library says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol


class Fragment(NamedTuple):
    """A piece of the parameter ``name`` in this rank's ``shard``: ``numel`` elements from ``start``
    of the shard, which are those from ``offset`` of the flattened parameter. There may be several
    of one parameter."""

    name: str
    shard: int
    start: int
    numel: int
    offset: int


class TensorInventory(NamedTuple):
    """What a rank holds between two steps: category (``harness.memory.record``) -> tensors.

    ``hidden``: bytes of communication buckets that C++ holds, where no Python tensor shows them.
    ``seen``: addresses of storages of those buckets that Python did get to see (a communication
    hook is given them), so that they are not counted twice. ``host``: tensors that the engine keeps
    in host memory, whether or not they are in ``tensors``: on a machine without a GPU their
    devices cannot tell, so these are the engine's own lists, not its settings.
    """

    tensors: dict[str, list[Any]]
    hidden: int = 0
    seen: frozenset[int] = frozenset()
    host: tuple[Any, ...] = ()


class AllocationScope(NamedTuple):
    """A method of a library, ``owner.method``: what is allocated while it runs is of ``category``
    (``harness.memory.record``; empty: as elsewhere) if the step is in one of ``phases``; empty
    means in any. ``place``, "device" or "host": where that is kept; empty: where what it is made of
    is kept. ``pinned``: on a GPU that host memory is pinned. ``beside``: on a GPU its copies run
    beside the computation."""

    owner: Any
    method: str
    category: str
    phases: tuple[str, ...] = ()
    place: str = ""
    pinned: bool = False
    beside: bool = False


class EngineReport(NamedTuple):
    """What an engine's library says of itself after a run, for the audit to compare; None where it
    says nothing, and the audit then looks elsewhere (the optimizer's state, the loop's log).

    ``steps``: optimizer steps taken, those before a resume too. ``clip``: the limit of the gradient
    norm that it applies by itself; 0.0: none. ``accumulation``: micro batches a step.
    ``micro_batch``: samples a rank. ``loss_scale``: of float16, now. ``config``: the settings that
    it ran with, as plain data for the result file. ``swapped_bytes``: what this rank has in files.
    """

    steps: int | None = None
    clip: float | None = None
    accumulation: int | None = None
    micro_batch: int | None = None
    loss_scale: float | None = None
    config: dict[str, Any] | None = None
    swapped_bytes: int = 0


# ---- books ----
# Where a prediction's stand-in for an engine writes what no op of a traced training shows.


class AllocationRecorder(Protocol):
    """Where an imitation records what no op of a traced training shows; the tracer of a prediction
    is one (``harness.planner.tracing.trace``)."""

    def hold(self, pool: str, size: int, op: str, category: str) -> Callable[[], None]:
        """Record ``size`` bytes of pool "device", "host" or "nvme" as held from now on, made by
        ``op`` (a name for the reader). Call the result to record that they are freed. Pool
        "passing" is the device's memory that no later step holds."""

    def pin(self, tensor: Any, pinned: bool = True) -> None:
        """Count a tensor in host memory as what it takes where it is ``pinned``
        (``strategies.base.pinned_block``), or, False, as its bytes after all."""

    def tag(self, category: str, tensors: Iterable[Any]) -> None:
        """Give tensors that live now their category, where they have none."""

    def move(self, category: str, source: str, target: str) -> int:
        """Count all of ``category`` that the trace has in pool ``source`` in pool ``target``
        instead, from the start of the trace on. Returns the bytes of it that are held now."""

    def work(self, phase: str, kind: str, size: int, group: int = 0, stride: int = 1) -> None:
        """Record ``size`` bytes moved in a phase of the step; kind is overlapped, host or nvme,
        ``group`` and ``stride`` say among which ranks (``harness.planner.speed.roofline.Work``)."""


# ---- settled ----
# A launch file with every number in place, for use without Headroom.


class ResolvedConfig(NamedTuple):
    """What an engine's launch file is, once a run of it is known (``Engine.settled``).

    ``content``: accelerate's YAML. ``files``: name -> content of each JSON that it names.
    ``blanks``: what only the user knows: "file: key" -> what to put there. ``handlers``: code of
    ``kwargs_handlers`` that ``Accelerator`` must be given, of classes that accelerate exports.
    """

    content: dict[str, Any]
    files: Mapping[str, dict[str, Any]] = {}
    blanks: Mapping[str, str] = {}
    handlers: tuple[str, ...] = ()

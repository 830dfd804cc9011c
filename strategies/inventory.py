"""Tensors, allocation sites and library statistics that an engine reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol


class Fragment(NamedTuple):
    """Piece of the parameter ``name`` in this rank's ``shard``.

    It has ``numel`` elements, from ``start`` of the shard and from ``offset`` of the flattened
    parameter. One parameter may have several.
    """

    name: str
    shard: int
    start: int
    numel: int
    offset: int


class TensorInventory(NamedTuple):
    """Tensors that a rank holds between two steps: category (``harness.memory.record``) -> tensors.

    ``hidden``: bytes of communication buckets that C++ holds, which no Python tensor shows.
    ``seen``: addresses of storages of those buckets that Python did see (a communication hook
    receives them), so that they are not counted twice. ``host``: tensors that the engine keeps in
    host memory, also if they are in ``tensors``. On a machine without a GPU their devices do not
    show this, so these are the engine's own lists, not its settings.
    """

    tensors: dict[str, list[Any]]
    hidden: int = 0
    seen: frozenset[int] = frozenset()
    host: tuple[Any, ...] = ()


class AllocationScope(NamedTuple):
    """Library method ``owner.method`` whose allocations belong to ``category``.

    ``category``: see ``harness.memory.record``; empty: the usual one. ``phases``: step phases in
    which the rule applies; empty: all. ``place``: placement of the allocations, "device" or "host";
    empty: that of their operands. ``pinned``: on a GPU that host memory is pinned. ``beside``: on a
    GPU its copies overlap with computation.
    """

    owner: Any
    method: str
    category: str
    phases: tuple[str, ...] = ()
    place: str = ""
    pinned: bool = False
    beside: bool = False


class EngineReport(NamedTuple):
    """Statistics of an engine's library after a run, for the audit to compare.

    A field is None if the library does not report it; the audit then reads the optimizer's state or
    the loop's log. ``steps``: optimizer steps taken, including those before a resume. ``clip``: the
    limit of the gradient norm that the engine applies by itself; 0.0: none. ``accumulation``:
    micro-batches per step. ``micro_batch``: samples per rank. ``loss_scale``: the current one of
    float16. ``config``: the settings in force, as plain data for the result file.
    ``swapped_bytes``: bytes of this rank in swap files.
    """

    steps: int | None = None
    clip: float | None = None
    accumulation: int | None = None
    micro_batch: int | None = None
    loss_scale: float | None = None
    config: dict[str, Any] | None = None
    swapped_bytes: int = 0


# ---- allocation recorder ----


class AllocationRecorder(Protocol):
    """Recorder of allocations that the dispatch trace cannot see.

    The tracer of a prediction implements it (``harness.planner.tracing.trace``).
    """

    def hold(self, pool: str, size: int, op: str, category: str) -> Callable[[], None]:
        """Record ``size`` bytes of pool "device", "host" or "nvme" as held from now on.

        ``op`` is a name for the reader. Call the result to record that they are freed. Pool
        "passing" is device memory that no later step holds.
        """

    def pin(self, tensor: Any, pinned: bool = True) -> None:
        """Count a host tensor by its pinned size (``strategies.base.pinned_block``), or if False by
        its bytes."""

    def tag(self, category: str, tensors: Iterable[Any]) -> None:
        """Set the category of live tensors that have none."""

    def move(self, category: str, source: str, target: str) -> int:
        """Count all of ``category`` in pool ``source`` as in pool ``target``, from the trace's
        start on.

        Returns the bytes of it that are held now.
        """

    def work(self, phase: str, kind: str, size: int, group: int = 0, stride: int = 1) -> None:
        """Record ``size`` bytes moved in a phase of the step.

        ``kind`` is overlapped, host or nvme. ``group`` and ``stride`` give the ranks that take part
        (``harness.prediction.Work``).
        """


# ---- resolved launch file ----


class ResolvedConfig(NamedTuple):
    """Launch file with every number filled in, for use without Headroom (``Engine.settled``).

    ``content``: accelerate's YAML. ``files``: name -> content of each JSON that it names.
    ``blanks``: values that only the user knows: "file: key" -> description. ``handlers``: code of
    ``kwargs_handlers`` that ``Accelerator`` needs, of classes that accelerate exports.
    """

    content: dict[str, Any]
    files: Mapping[str, dict[str, Any]] = {}
    blanks: Mapping[str, str] = {}
    handlers: tuple[str, ...] = ()

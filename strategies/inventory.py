"""Tensors, allocation sites and library statistics that an engine reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """Part of the parameter ``name``: ``numel`` elements, from ``start`` of a shard and from
    ``offset`` of the flattened parameter, which may have several."""

    name: str
    start: int
    numel: int
    offset: int


class Shard(NamedTuple):
    """Tensor that the optimizer updates on this rank: a parameter, or a piece of several such as a
    flat float32 master.

    ``state()``: the optimizer's of it. ``pieces()``: parts of parameters in it that this rank
    answers for: over all ranks each element is in one. Both are computed when called, because an
    average passes over all shards in each step.
    """

    number: int
    tensor: Any
    state: Callable[[], Mapping[str, Any]]
    pieces: Callable[[], Iterable[Piece]]


class TensorInventory(NamedTuple):
    """Tensors that a rank holds between two steps: category (``harness.memory.record``) -> tensors.

    ``hidden``: bytes of communication buckets that C++ holds. ``seen``: addresses of storages of
    those buckets that a communication hook received, so that they are not counted twice. ``host``:
    tensors that the engine keeps in host memory, also if they are in ``tensors``, read from its own
    lists: on a CPU their devices do not show it.
    """

    tensors: dict[str, list[Any]]
    hidden: int = 0
    seen: frozenset[int] = frozenset()
    host: tuple[Any, ...] = ()


class ParameterPart(NamedTuple):
    """One rank's part of a parameter, which may be empty, and the ``shape`` of the whole one."""

    tensor: Any
    shape: Any


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


class TracePoints(NamedTuple):
    """Places of one rank at which a traced step categorizes allocations: the ``leaves`` at which
    autograd's gradients arrive, and ``scopes`` of buffers that live only within a step."""

    leaves: Sequence[Any]
    scopes: Sequence[AllocationScope] = ()


class EngineReport(NamedTuple):
    """Statistics of an engine's library after a run, for the audit to compare; None: not reported.

    ``steps``: optimizer steps taken, including those before a resume. ``clip``: the limit of the
    gradient norm that the engine applies by itself; 0.0: none. ``accumulation``: micro-batches per
    step. ``micro_batch``: samples per rank. ``loss_scale``: the current one of float16. ``config``:
    the settings in force, as plain data for the result file.
    ``swapped_bytes``: bytes of this rank in swap files. ``gradient_bucket_bytes``: bytes of each
    tensor in which gradients of several parameters arrive together in backward.
    """

    steps: int | None = None
    clip: float | None = None
    accumulation: int | None = None
    micro_batch: int | None = None
    loss_scale: float | None = None
    config: dict[str, Any] | None = None
    swapped_bytes: int = 0
    gradient_bucket_bytes: tuple[int, ...] | None = None

"""What an engine tells of a run: what a rank holds, what makes it, and what its library says."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Fragment", "Holdings", "Maker", "Told"]


class Fragment(NamedTuple):
    """A piece of the parameter ``name`` in this rank's ``shard``: ``numel`` elements from ``start``
    of the shard, which are those from ``offset`` of the flattened parameter. There may be several
    of one parameter."""

    name: str
    shard: int
    start: int
    numel: int
    offset: int


class Holdings(NamedTuple):
    """What a rank holds between two steps: category (``harness.memory.categories``) -> tensors.

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


class Maker(NamedTuple):
    """A method of a library, ``owner.method``: what is allocated while it runs is of ``category``
    (``harness.memory.categories``; empty: as elsewhere) if the step is in one of ``phases``; empty
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


class Told(NamedTuple):
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

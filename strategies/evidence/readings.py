"""Record of a watched step (``strategies.evidence.watching``), and tensors by their true bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")


class Ran(NamedTuple):
    """Operator of the step: torch's name (aten::mm), shapes of its operands, type of its first
    result. ``phase``: one of ``STEP_PHASES``, or the word of ``watching.in_phase``."""

    name: str
    shapes: list[list[int]]
    dtype: str
    phase: str


class Sent(NamedTuple):
    """Input of one collective (allreduce_, _allgather_base_) on this rank: type and bytes;
    ``group``: torch's name of the group of ranks."""

    collective: str
    dtype: str
    bytes: int
    phase: str
    group: str = ""


@dataclass
class Observed:
    """Record of one step. ``notes``: the strategies' own, by name; ``engine``: the engine's. If
    blocks are compiled, ``ran`` and ``sent`` are empty: a watched graph would run uncompiled."""

    micro_steps: int = 0
    ran: list[Ran] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    engine: Any = None

    def products(self, *phases: str) -> Counter[str]:
        """Return type of the result -> number of matrix products in these phases."""
        return Counter(r.dtype for r in self.ran if r.name in PRODUCTS and r.phase in phases)


# ---- tensors by their true bytes ----


def stored(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that hold ``tensor``'s bytes. A low-bit state looks like float32 and
    wraps codes and scales; a sparse tensor is its indices and values."""
    if wrapped((type(tensor),)):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:  # a DTensor's parts include its mesh
            if hasattr(part, "untyped_storage"):
                yield from stored(part)
    elif tensor.is_sparse:
        yield from (tensor._indices(), tensor._values())
    else:
        yield tensor


def scales(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield bitsandbytes' scales of the codes of ``tensor``; nothing for another tensor."""
    state = getattr(tensor, "quant_state", None)
    while state is not None:
        yield from (t for t in (state.absmax, state.code) if t is not None)
        state = getattr(state, "state2", None)


def within(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested structure, without parameters."""
    import torch
    from torch.utils._pytree import tree_leaves

    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if not isinstance(leaf, torch.nn.Parameter)]


def wrapped(types: Iterable[type]) -> bool:
    """Return whether an operand type of an operator wraps the tensors that hold its bytes.

    A dispatch mode then returns NotImplemented: the subclass unwraps first, and the mode sees the
    operators on plain tensors. FakeTensor and similar classes wrap nothing.
    """
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def tensors(optimizer: Any) -> list[torch.Tensor]:
    """Return every plain tensor in an optimizer's state."""
    import torch

    values = [v for state in optimizer.state.values() for v in state.values()]
    return [t for v in values if isinstance(v, torch.Tensor) for t in stored(v)]


def bytes_of(parts: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of these tensors; one that several share counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts}
    return sum(storages.values())

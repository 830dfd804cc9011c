"""What a watched training step showed (``strategies.evidence.watching`` takes it)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")


class Ran(NamedTuple):
    """One operator of the step: torch's name (aten::mm), shapes of its operands, the type of its
    first result, and the phase of the step (``strategies.engine.STEP_PHASES``), or the word under
    which it ran beside the trained model (``strategies.evidence.watching.beside``)."""

    name: str
    shapes: list[list[int]]
    dtype: str
    phase: str


class Sent(NamedTuple):
    """What this rank handed to one collective (allreduce_, _allgather_base_): type and bytes;
    ``group``: torch's name of the ranks that it is among."""

    collective: str
    dtype: str
    bytes: int
    phase: str
    group: str = ""


@dataclass
class Observed:
    """What one step showed. ``ran`` and ``sent`` are empty where the blocks are compiled, since a
    watched graph would run uncompiled; ``notes`` are the strategies' own, by name, ``engine`` the
    engine's."""

    micro_steps: int = 0
    ran: list[Ran] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    engine: Any = None

    def products(self, *phases: str) -> Counter[str]:
        """Type of the result -> matrix products in these phases."""
        return Counter(r.dtype for r in self.ran if r.name in PRODUCTS and r.phase in phases)

    def sent_in(self, *phases: str) -> dict[str, int]:
        """Collective and type -> bytes that this rank handed over in these phases."""
        total: Counter[str] = Counter()
        for sent in self.sent:
            if sent.phase in phases:
                total[f"{sent.collective.strip('_')} {sent.dtype}"] += sent.bytes
        return dict(total)


# ---- stored ----
# Tensors by their true bytes: what a subclass wraps, and what shares a storage.


def stored(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that hold ``tensor``'s bytes.

    A low-bit state is a subclass that looks like float32 and wraps codes, scales and a table. A
    sparse tensor is its indices and values.
    """
    if wrapped((type(tensor),)):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:  # a DTensor names its mesh among them
            if hasattr(part, "untyped_storage"):
                yield from stored(part)
    elif tensor.is_sparse:
        yield from (tensor._indices(), tensor._values())
    else:
        yield tensor


def scales(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What bitsandbytes keeps beside the codes of ``tensor``; nothing beside another tensor."""
    state = getattr(tensor, "quant_state", None)
    while state is not None:
        yield from (t for t in (state.absmax, state.code) if t is not None)
        state = getattr(state, "state2", None)


def within(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested structure, parameters left out."""
    import torch
    from torch.utils._pytree import tree_leaves

    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if not isinstance(leaf, torch.nn.Parameter)]


def wrapped(types: Iterable[type]) -> bool:
    """Whether one of an operation's types of operands wraps the tensors that hold its bytes.

    A dispatch mode is off while it calls such an operation, so it never sees what the subclass
    calls inside. If the mode gives way (returns NotImplemented) the subclass unwraps first, and
    the mode sees the operations on plain tensors. FakeTensor and its like have nothing inside.
    """
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def tensors(optimizer: Any) -> list[torch.Tensor]:
    """Every plain tensor in an optimizer's state."""
    import torch

    values = [v for state in optimizer.state.values() for v in state.values()]
    return [t for v in values if isinstance(v, torch.Tensor) for t in stored(v)]


def bytes_of(parts: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind these tensors; one that several share counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts}
    return sum(storages.values())

"""Where a training's tensors are kept, where their devices cannot tell: a CPU as the device.

There host memory is both the device and the host that an offload moves things to. A tensor is in
host memory if the engine or a strategy keeps it there (``Holdings.host``, ``Attachment.hosted``),
if a method made it there (``Maker.place``), or if it was computed from such tensors alone: an
operation runs where its operands are. All else is on the device.

On a GPU an operation of tensors in two places fails, so a library copies to the device first; on a
CPU that copy is left out (``Tensor.to`` returns what it was given). Where the engine's library or a
collective takes both, the copies are counted on the device as long as the operation lasts. Where
forward itself does, a place that was named is wrong: the places of such a step are not believed,
and everything counts as on the device. What stays unseen: a tensor that a library copies to the
device and converts there by itself counts as in host memory, for the length of an operation.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from strategies.evidence.stored import stored

__all__ = ["BY_DEVICE", "BY_ENGINE", "DEVICE", "HOST", "Places", "storage_of"]

DEVICE, HOST = "device", "host"
BY_DEVICE = "each tensor's own device"
BY_ENGINE = "the engine's placement; on a CPU both are host memory"
COPIES = frozenset({"copy_", "_to_copy", "_foreach_copy_", "set_"})
"""Operations of aten that may take operands in two places."""
MOVING = frozenset({"c10d", "_c10d_functional"})
"""Namespaces of operations that send: what a copy to the device would have been for."""


def storage_of(tensor: torch.Tensor) -> Any | None:
    """The storage of a plain tensor; None for a layout, or a subclass, without one of its own."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


class Places:
    """Which storages that live now are in host memory. ``joined``: operations of forward that took
    operands in both places, by name."""

    def __init__(self) -> None:
        self.hosted: set[int] = set()
        self.joined: Counter[str] = Counter()

    def put(self, key: int, pool: str) -> None:
        """A storage, by its address, is kept in ``pool`` from now on."""
        (self.hosted.add if pool == HOST else self.hosted.discard)(key)

    def forget(self, key: int) -> None:
        """A storage has died: its address may be another's."""
        self.hosted.discard(key)

    def of_operands(self, values: Any) -> str:
        """Where an operation's result is: in host memory if all its operands are."""
        keys = [key for key, _ in _operands(values)] if self.hosted else []
        return HOST if keys and self.hosted.issuperset(keys) else DEVICE

    def copied(self, func: Any, values: Any, phase: str, in_library: bool) -> int:
        """Bytes that a GPU would copy to the device for this operation. What forward does outside
        the engine's library is noted in ``joined``, for no GPU would."""
        if not self.hosted or _name(func) in COPIES:
            return 0
        operands = _operands(values)
        here = sum(size for key, size in operands if key in self.hosted)
        if not here or self.hosted.issuperset(key for key, _ in operands):
            return 0
        if in_library or func.namespace in MOVING:
            return here
        if phase == "forward":
            self.joined[str(func)] += 1
        return 0

    @property
    def known_by(self) -> str:
        """How the places of a step were known; begins with "unknown" where they were not."""
        if not self.joined:
            return BY_ENGINE
        (name, _), calls = self.joined.most_common(1)[0], self.joined.total()
        return f"unknown: {calls} operations of forward took operands in both places, as {name}"


def _name(func: Any) -> str:
    return func._schema.name.partition("::")[2]


def _operands(values: Any) -> list[tuple[int, int]]:
    """What identifies the storage of each operand, and the operand's bytes; a number as a tensor
    may be anywhere."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    plain = [(tensor, storage_of(tensor)) for leaf in leaves for tensor in stored(leaf)]
    return [(storage._cdata, tensor.nbytes) for tensor, storage in plain if storage is not None]

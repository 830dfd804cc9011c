"""Where a training's tensors are kept, where their devices cannot tell: a CPU as the device.

There host memory is both the device and the host that an offload moves things to. A tensor is in
host memory if the engine or a strategy keeps it there (``Holdings.host``, ``Attachment.hosted``), if
a method made it there (``Maker.place``), or if it was computed from such tensors alone: an operation
runs where its operands are. All else is on the device.

On a GPU an operation of tensors in two places fails. So one in forward that takes both says that a
place is wrong, or that a copy to the device was left out because the CPU needs none: the places of
such a step are not believed, and everything counts as on the device.
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
        keys = _keys(values) if self.hosted else []
        return HOST if keys and self.hosted.issuperset(keys) else DEVICE

    def watch(self, func: Any, values: Any, phase: str) -> None:
        """Note an operation of forward that a GPU would refuse."""
        if phase != "forward" or not self.hosted or _may_join(func):
            return
        keys = _keys(values)
        if not self.hosted.isdisjoint(keys) and not self.hosted.issuperset(keys):
            self.joined[str(func)] += 1

    @property
    def known_by(self) -> str:
        """How the places of a step were known; begins with "unknown" where they were not."""
        if not self.joined:
            return BY_ENGINE
        (name, _), calls = self.joined.most_common(1)[0], sum(self.joined.values())
        return f"unknown: {calls} operations of forward took operands in both places, as {name}"


def _may_join(func: Any) -> bool:
    name = func._schema.name.partition("::")[2]
    return func.namespace in MOVING or name in COPIES


def _keys(values: Any) -> list[int]:
    """What identifies the storages of operands; a number as a tensor may be anywhere."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    storages = (storage_of(plain) for leaf in leaves for plain in stored(leaf))
    return [storage._cdata for storage in storages if storage is not None and storage.nbytes()]

"""Which module runs: in forward by hooks, in backward by autograd's sequence numbers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["Stack", "alike", "saving"]


def alike(name: str) -> str:
    """The name shared by a module's siblings: ``blocks.3.attn`` is ``blocks.*.attn``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


class Stack:
    """The module that runs now, by name; empty outside the model.

    Autograd numbers the nodes that forward creates. Each module's call owns a range of numbers,
    and a node that runs in backward lies in the range of the innermost call that made it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names: list[str] = []
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, str]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[Stack]:
        """Follow every module's forward while this lasts."""
        handles = []
        for name, part in self.module.named_modules():
            if name:
                handles.append(part.register_forward_pre_hook(self._entering(name), prepend=True))
                handles.append(part.register_forward_hook(self._left, always_call=True))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def now(self) -> str:
        """The running module; in backward the one whose forward made the running node."""
        if self.names:
            return self.names[-1]
        node = torch._C._current_autograd_node()
        return self._owner(node._sequence_nr()) if node is not None else ""

    def _owner(self, number: int) -> str:
        inside = [
            (stop - start, name) for start, stop, name in self._ranges if start <= number < stop
        ]
        return min(inside)[1] if inside else ""

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, given: Any) -> None:
            self.names.append(name)
            self._starts.append(torch.autograd._get_sequence_nr())

        return enter

    def _left(self, module: nn.Module, given: Any, out: Any) -> None:
        span = (self._starts.pop(), torch.autograd._get_sequence_nr())
        self._ranges.append((*span, self.names.pop()))


@contextlib.contextmanager
def saving(stack: Stack, parameters: set[int]) -> Iterator[dict[int, tuple[str, int]]]:
    """What autograd saves: storage -> (the first module that saved it, bytes).

    Counted by saved-tensors hooks alone, so that the trace's count can be checked against it.
    ``parameters`` are storages that are left out: they would live without backward too.
    """
    saved: dict[int, tuple[str, int]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved.setdefault(storage._cdata, (stack.now(), storage.nbytes()))
        # An output that its own node saves would keep node and tensor alive for good.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved

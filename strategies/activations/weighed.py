"""Block runner that measures the bytes that autograd saves for the blocks."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """Call of a runner: the blocks, and its inputs as tensors on meta."""

    blocks: tuple[Any, ...]
    given: tuple[tuple[Any, ...], dict[str, Any]]

    @property
    def block(self) -> Any:
        """First of the blocks."""
        return self.blocks[0]

    @property
    def count(self) -> int:
        return len(self.blocks)

    @property
    def tensors(self) -> list[Any]:
        """Input tensors."""
        import torch
        from torch.utils._pytree import tree_leaves

        return [leaf for leaf in tree_leaves(self.given) if isinstance(leaf, torch.Tensor)]

    @property
    def input_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class MeasuredBlocks:
    """Block runner around another one (``inner``; the innermost is the module's own).

    It measures the bytes that autograd saves in the first forward of each block: ``kept_bytes``,
    without weights, each tensor once. Blocks that it is ``passing`` to ``inner`` unchanged are left
    out. ``calls`` are those of that first forward, with meta tensors instead of the inputs.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.kept_bytes = 0
        self.calls: list[Call] = []
        self.weighing = self.within = self.passing = False
        self._begun: set[int] = set()
        self._seen: dict[int, weakref.ref[Any]] = {}
        if isinstance(inner, MeasuredBlocks):
            inner.within = True  # autograd calls one of nested hooks: this one, which forwards

    def __call__(self, blocks: Any, *given: Any, **named: Any) -> Any:
        import torch

        if not torch.is_grad_enabled():
            return self.inner(blocks, *given, **named)
        if id(blocks[0]) in self._begun:
            return self.run(blocks, *given, **named)
        self._begun.add(id(blocks[0]))
        self.calls.append(_noted(blocks, given, named))
        weigh = torch.compiler.disable(self.weigh)  # a compiled block would trace it
        hooks = torch.autograd.graph.saved_tensors_hooks(weigh, lambda kept: kept)
        self.weighing = True
        with contextlib.nullcontext() if self.within else hooks:
            out = self.run(blocks, *given, **named)
        self.weighing = False
        return out

    @property
    def blocks(self) -> int:
        """Number of blocks that it ran."""
        return sum(call.count for call in self.calls)

    def run(self, blocks: Any, *given: Any, **named: Any) -> Any:
        """Run the blocks, with gradients."""
        return self.inner(blocks, *given, **named)

    def weigh(self, kept: Any) -> Any:
        """Count a tensor that autograd saves; also for a runner inside this one."""
        storage = kept.untyped_storage()
        known = self._seen.get(kept.data_ptr(), lambda: None)() is not None
        if not (self.passing or known or is_weight(kept)):
            self._seen[kept.data_ptr()] = weakref.ref(storage)
            self.kept_bytes += kept.nbytes
        if isinstance(self.inner, MeasuredBlocks):
            self.inner.weigh(kept)
        return kept


def _noted(blocks: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Call:
    import torch
    from torch.utils._pytree import tree_map_only

    from strategies import initial

    def like(tensor: Any) -> Any:
        with initial.valueless():  # a prediction's simulated GPU is on meta too
            return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)

    return Call(tuple(blocks), tree_map_only(torch.Tensor, like, (given, named)))


def is_weight(kept: Any) -> bool:
    """Return whether a saved tensor is a parameter, autocast's copy of one, or a view of either."""
    from torch import nn

    base = kept if kept._base is None else kept._base
    if isinstance(base, nn.Parameter):
        return True
    made_by = base.grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return False
    return made_by.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"

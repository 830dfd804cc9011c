"""Block runner that measures the bytes that autograd saves for the blocks."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, NamedTuple


class Call(NamedTuple):
    """Call of a runner: the blocks, and number and bytes of its input tensors."""

    blocks: tuple[Any, ...]
    inputs: int
    input_bytes: int


class MeasuredBlocks:
    """Block runner around another one (``inner``; the innermost is the module's own).

    It measures the bytes that autograd saves in the first forward of each block: ``kept_bytes``,
    without weights, each tensor once. Blocks that it is ``passing`` to ``inner`` unchanged are left
    out. ``calls`` are those of that first forward.
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
        from torch.utils._pytree import tree_leaves

        if not torch.is_grad_enabled():
            return self.inner(blocks, *given, **named)
        if id(blocks[0]) in self._begun:
            return self.run(blocks, *given, **named)
        self._begun.add(id(blocks[0]))
        leaves = tree_leaves((given, named))
        sizes = [leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.calls.append(Call(tuple(blocks), len(sizes), sum(sizes)))
        weigh = torch.compiler.disable(self.weigh)  # a compiled block would trace it
        hooks = torch.autograd.graph.saved_tensors_hooks(weigh, lambda kept: kept)
        self.weighing = True
        with contextlib.nullcontext() if self.within else hooks:
            out = self.run(blocks, *given, **named)
        self.weighing = False
        return out

    @property
    def blocks(self) -> list[Any]:
        """Blocks that it ran, in the order of their first calls."""
        return [block for call in self.calls for block in call.blocks]

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

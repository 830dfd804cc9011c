"""Nested wrappers of the function that runs a model's blocks, and the bytes that they keep."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.subject import Subject


Runner = Callable[..., Any]
"""``runner(blocks, *given, **named)``: run the blocks in order, from the first block's inputs to
the last block's output."""


def surround(module: Any, subject: Subject, wrap: Callable[[Runner], Runner]) -> None:
    """Wrap the runner of the blocks of ``module`` by ``wrap``.

    A model with the part "chain" runs all blocks by one call of ``module.run_blocks``. In any other
    model each block is a call of its own.
    """
    if not hasattr(module, "run_blocks"):
        run_singly(module, subject.blocks(module), "run_blocks")
    module.run_blocks = wrap(module.run_blocks)


def run_singly(module: Any, blocks: list[Any], runner: str) -> None:
    """Give each block a subclass of its class whose call goes through the attribute ``runner``.

    It replaces the call, not ``forward``: an engine's hooks run in between, and gather a block's
    weights again in recomputation.
    """
    owner: Callable[[], Any] = weakref.ref(module)
    kinds: dict[type, type] = {}

    def call(block: Any, *given: Any, **named: Any) -> Any:
        return getattr(owner(), runner)([block], *given, **named)

    for block in blocks:
        kind = type(block)
        if kind not in kinds:
            members = {"__call__": call, "__module__": kind.__module__, "plain_kind": kind}
            kinds[kind] = type(kind.__name__, (kind,), members)
        block.__class__ = kinds[kind]
    setattr(module, runner, _run_one)


def _run_one(blocks: list[Any], *given: Any, **named: Any) -> Any:
    (block,) = blocks
    return block.plain_kind.__call__(block, *given, **named)


def runner_of(module: Any, kind: type) -> Any:
    """Return the runner of class ``kind`` in the module's chain, or None."""
    runner = getattr(module, "run_blocks", None)
    while runner is not None and not isinstance(runner, kind):
        runner = getattr(runner, "inner", None)
    return runner


# ---- measured blocks ----


class MeasuredBlocks:
    """Block runner around another one (``inner``; the innermost is the module's own).

    It measures the bytes that autograd saves in the first forward of each block: ``kept_bytes``,
    without weights, each tensor once. Blocks that it is ``passing`` to ``inner`` unchanged are left
    out. ``calls`` are those of that first forward: the blocks, and the bytes of their inputs.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.kept_bytes = 0
        self.calls: list[tuple[list[Any], int]] = []
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
        size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        self.calls.append(([*blocks], size))
        weigh = torch.compiler.disable(self.weigh)  # a compiled block would trace it
        hooks = torch.autograd.graph.saved_tensors_hooks(weigh, lambda saved: saved)
        self.weighing = True
        with contextlib.nullcontext() if self.within else hooks:
            out = self.run(blocks, *given, **named)
        self.weighing = False
        return out

    @property
    def blocks(self) -> list[Any]:
        """Blocks that it ran, in the order of their first calls."""
        return [block for blocks, _ in self.calls for block in blocks]

    def run(self, blocks: Any, *given: Any, **named: Any) -> Any:
        """Run the blocks, with gradients."""
        return self.inner(blocks, *given, **named)

    def weigh(self, saved: Any) -> Any:
        """Count a tensor that autograd saves; also for a runner inside this one."""
        storage = saved.untyped_storage()
        known = self._seen.get(saved.data_ptr(), lambda: None)() is not None
        if not (self.passing or known or is_weight(saved)):
            self._seen[saved.data_ptr()] = weakref.ref(storage)
            self.kept_bytes += saved.nbytes
        if isinstance(self.inner, MeasuredBlocks):
            self.inner.weigh(saved)
        return saved


def is_weight(saved: Any) -> bool:
    """Return whether a saved tensor is a parameter, autocast's copy of one, or a view of either."""
    from torch import nn

    base = saved if saved._base is None else saved._base
    if isinstance(base, nn.Parameter):
        return True
    made_by = base.grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return False
    return made_by.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"

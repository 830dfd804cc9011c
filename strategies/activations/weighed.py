"""What several strategies put in the place of ``run_blocks``, one around the other."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

__all__ = ["Weighed", "is_weight", "runner_of"]


class Weighed:
    """A way to run blocks around another one (``inner``; the innermost is the module's own).

    Weighs, in the first forward, what autograd holds for the blocks: ``kept_bytes``, weights left
    out, each tensor once. ``given`` says what one block is given, ``input_bytes`` how much.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.kept_bytes = self.input_bytes = 0
        self.given: list[dict[str, Any]] = []
        self.weighing = self.within = False
        self._seen: dict[int, weakref.ref] = {}
        if isinstance(inner, Weighed):
            inner.within = True  # autograd tells the innermost hook alone: ours tells it on

    def __call__(self, blocks: Any, x_BTD: Any, c_BD: Any) -> Any:
        import torch

        if not torch.is_grad_enabled():
            return self.inner(blocks, x_BTD, c_BD)
        if self.input_bytes:
            return self.run(blocks, x_BTD, c_BD)
        self.input_bytes, self.weighing = x_BTD.nbytes + c_BD.nbytes, True
        self.given = [
            {"size": t.shape, "dtype": t.dtype, "device": t.device} for t in (x_BTD, c_BD)
        ]
        weigh = torch.compiler.disable(self.weigh)  # a compiled block would trace it
        hooks = torch.autograd.graph.saved_tensors_hooks(weigh, lambda kept: kept)
        with contextlib.nullcontext() if self.within else hooks:
            x_BTD = self.run(blocks, x_BTD, c_BD)
        self.weighing = False
        return x_BTD

    def run(self, blocks: Any, x_BTD: Any, c_BD: Any) -> Any:
        """The blocks, with gradients."""
        return self.inner(blocks, x_BTD, c_BD)

    def weigh(self, kept: Any) -> Any:
        """Count a tensor that autograd keeps; also for a runner within this one."""
        storage = kept.untyped_storage()
        known = self._seen.get(kept.data_ptr(), lambda: None)() is not None
        if not is_weight(kept) and not known:
            self._seen[kept.data_ptr()] = weakref.ref(storage)
            self.kept_bytes += kept.nbytes
        if isinstance(self.inner, Weighed):
            self.inner.weigh(kept)
        return kept


def is_weight(kept: Any) -> bool:
    """Whether a tensor that autograd keeps is a parameter, autocast's copy of one, or a view."""
    from torch import nn

    base = kept if kept._base is None else kept._base
    if isinstance(base, nn.Parameter):
        return True
    made_by = base.grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return False
    return made_by.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"


def runner_of(module: Any, kind: type) -> Any | None:
    """The runner of that kind in the module's chain of them, or None."""
    runner = module.run_blocks
    while runner is not None and not isinstance(runner, kind):
        runner = getattr(runner, "inner", None)
    return runner

"""What several strategies put in the place of ``run_blocks``, one around the other."""

from __future__ import annotations

from typing import Any

__all__ = ["Weighed", "is_weight", "runner_of"]


class Weighed:
    """A way to run blocks around another one (``inner``; the innermost is the module's own).

    Weighs, in the first forward, what autograd holds for the blocks: ``kept_bytes``, weights left
    out, each tensor once. ``input_bytes`` is the size of what one block is given.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.kept_bytes = self.input_bytes = 0
        self.weighing = False
        self._seen: set[int] = set()

    def __call__(self, blocks: Any, x_BTD: Any, c_BD: Any) -> Any:
        import torch

        if not torch.is_grad_enabled():
            return self.inner(blocks, x_BTD, c_BD)
        if self.input_bytes:
            return self.run(blocks, x_BTD, c_BD)
        self.input_bytes, self.weighing = _bytes(x_BTD) + _bytes(c_BD), True
        weigh = torch.compiler.disable(self._weigh)  # a compiled block would trace it
        with torch.autograd.graph.saved_tensors_hooks(weigh, lambda kept: kept):
            x_BTD = self.run(blocks, x_BTD, c_BD)
        self.weighing = False
        return x_BTD

    def run(self, blocks: Any, x_BTD: Any, c_BD: Any) -> Any:
        """The blocks, with gradients."""
        return self.inner(blocks, x_BTD, c_BD)

    def _weigh(self, kept: Any) -> Any:
        if not is_weight(kept) and kept.data_ptr() not in self._seen:
            self._seen.add(kept.data_ptr())
            self.kept_bytes += _bytes(kept)
        return kept


def _bytes(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size()


def is_weight(kept: Any) -> bool:
    """Whether a tensor that autograd keeps is a parameter or a view of one."""
    from torch import nn

    return isinstance(kept, nn.Parameter) or isinstance(kept._base, nn.Parameter)


def runner_of(module: Any, kind: type) -> Any | None:
    """The runner of that kind in the module's chain of them, or None."""
    runner = module.run_blocks
    while runner is not None and not isinstance(runner, kind):
        runner = getattr(runner, "inner", None)
    return runner

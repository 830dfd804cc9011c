"""``Accelerator.backward`` called in another way than usual, and what one backward did."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from strategies.engine import Trained
from strategies.evidence import forward

__all__ = ["Caller", "bytes_in", "effect_of_a_backward"]


class Caller:
    """``Accelerator.backward`` replaced; counts its calls. ``lived``: bytes of gradients that were
    there before the last, from the step before; ``kept``: of those that it added to."""

    def __init__(self, accelerator: Any, parameters: list[Any], call: str) -> None:
        self.usual, self.parameters, self.call = accelerator.backward, parameters, call
        self.calls = self.lived = self.kept = 0

    def __call__(self, loss: Any, **kwargs: Any) -> None:
        self.calls += 1
        self.lived = bytes_in(p.grad for p in self.parameters if p.grad is not None)
        if self.call == "retain_graph":
            self.usual(loss, retain_graph=True, **kwargs)
        elif self.call == "clear_late":
            for p in self.parameters:
                p.grad = None
            self.usual(loss, **kwargs)
        elif self.call == "zero_late":
            self._zeroed(loss, **kwargs)
        else:
            self._autograd_grad(loss)

    def _zeroed(self, loss: Any, **kwargs: Any) -> None:
        lived = [p.grad for p in self.parameters]
        for grad in lived:
            if grad is not None:
                grad.zero_()
        self.usual(loss, **kwargs)
        pairs = zip(self.parameters, lived, strict=True)
        self.kept = bytes_in(g for p, g in pairs if g is not None and p.grad is g)

    def _autograd_grad(self, loss: Any) -> None:
        import torch

        for p, gradient in zip(
            self.parameters, torch.autograd.grad(loss, self.parameters), strict=True
        ):
            p.grad = gradient if p.grad is None else p.grad + gradient


def bytes_in(tensors: Iterable[Any]) -> int:
    """Bytes of their elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


class BackwardEffect(NamedTuple):
    """What one backward did: gradients that parameters hold by then, how many of them autograd
    itself accumulated there, and whether the graph can be gone through again."""

    gradients: int
    accumulated: int
    graph_kept: bool


def effect_of_a_backward(trained: Trained) -> BackwardEffect:
    """One more backward, called as the loop calls it."""
    import torch

    weights = [p for p in trained.module.parameters() if p.requires_grad]
    arrived: list[Any] = []
    hooks = [p.register_post_accumulate_grad_hook(arrived.append) for p in weights]
    loss = forward.loss_once(trained)
    try:
        trained.accelerator.backward(loss)
    finally:
        for hook in hooks:
            hook.remove()
    gradients = sum(p.grad is not None for p in weights)
    trained.optimizer.zero_grad()
    try:
        torch.autograd.grad(loss, weights[-1])
    except RuntimeError:  # its saved tensors were freed
        return BackwardEffect(gradients, len(arrived), graph_kept=False)
    return BackwardEffect(gradients, len(arrived), graph_kept=True)

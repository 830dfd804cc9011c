"""Other ways to call backward, which forum answers recommend or warn of: here to be measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from strategies.base import Slot, demand
from strategies.engine import Launch, Trained
from strategies.evidence import forward
from strategies.strategy import Strategy

__all__ = ["Backward"]


class Caller:
    """``Accelerator.backward`` replaced; counts its calls."""

    def __init__(self, accelerator: Any, parameters: list[Any], call: str) -> None:
        self.usual, self.parameters, self.call = accelerator.backward, parameters, call
        self.calls = 0

    def __call__(self, loss: Any, **kwargs: Any) -> None:
        self.calls += 1
        if self.call == "retain_graph":
            self.usual(loss, retain_graph=True, **kwargs)
        else:
            self._autograd_grad(loss)

    def _autograd_grad(self, loss: Any) -> None:
        import torch

        for p, gradient in zip(
            self.parameters, torch.autograd.grad(loss, self.parameters), strict=True
        ):
            p.grad = gradient if p.grad is None else p.grad + gradient


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


@dataclass(frozen=True, kw_only=True)
class Backward(Strategy):
    """Keeps the graph (``retain_graph``), or collects gradients with ``torch.autograd.grad``
    (``autograd_grad``). Neither is a way to train: the row shows what it costs.
    """

    name: ClassVar[str] = "backward"
    slot: ClassVar[Slot] = Slot.STEP
    source: ClassVar[str] = "torch.autograd.grad and Tensor.backward, as posts use them"

    call: str = "retain_graph"

    def __post_init__(self) -> None:
        if self.call not in ("retain_graph", "autograd_grad"):
            raise ValueError(f"call is {self.call!r}; one of retain_graph, autograd_grad")

    def refuses(self, launch: Launch) -> str | None:
        if "one_process" not in launch.traits:
            return (
                "is measured in one plain process: autograd.grad bypasses DDP's hooks, and an "
                "engine calls backward itself; use single"
            )
        if launch.accumulation > 1:
            return "is measured with one backward a step; leave accumulate out"
        if self.call == "autograd_grad" and "scales_gradients" in launch.traits:
            return "autograd.grad leaves out the loss scale that the optimizer divides by; use bf16"
        return None

    def configure(self, accelerator: Any, module: Any, launch: Launch) -> None:
        parameters = [p for p in module.parameters() if p.requires_grad]
        accelerator.backward = Caller(accelerator, parameters, self.call)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        caller = trained.accelerator.backward
        demand(isinstance(caller, Caller), "backward is called as usual")
        calls = caller.calls
        demand(calls == trained.micro_steps, f"{calls} calls")
        effect = effect_of_a_backward(trained)
        weights = sum(p.requires_grad for p in trained.module.parameters())
        demand(effect.gradients == weights, f"{effect.gradients} gradients of {weights} weights")
        if self.call == "retain_graph":
            demand(effect.graph_kept, "the graph is gone after backward")
        else:
            demand(not effect.accumulated, f"autograd accumulated {effect.accumulated} gradients")
        return {"calls": calls, **effect._asdict()}

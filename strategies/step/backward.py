"""Other ways to call backward, which forum answers recommend or warn of: here to be measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Slot, demand
from strategies.engine import Launch, Trained
from strategies.step.caller import Caller, bytes_in, effect_of_a_backward
from strategies.strategy import Strategy

__all__ = ["Backward"]

CALLS = ("retain_graph", "autograd_grad", "clear_late", "zero_late")
LATE = ("clear_late", "zero_late")
"""Calls that clear gradients themselves, where nothing else then does."""


@dataclass(frozen=True, kw_only=True)
class Backward(Strategy):
    """Keeps the graph (``retain_graph``), collects gradients with ``torch.autograd.grad``
    (``autograd_grad``), clears those of the last step right before backward (``clear_late``), so
    that they live through a forward pass, or fills them with zeros there (``zero_late``, what torch
    before 2.0 and accelerate before 0.28 do), so that they live always. The row shows what it
    costs.
    """

    name: ClassVar[str] = "backward"
    slot: ClassVar[Slot] = Slot.STEP
    source: ClassVar[str] = (
        "torch.autograd.grad and Tensor.backward, as posts use them; facebookresearch/DiT and "
        "fast-DiT, train.py (clear_late, zero_late)"
    )

    call: str = "retain_graph"

    def __post_init__(self) -> None:
        if self.call not in CALLS:
            raise ValueError(f"call is {self.call!r}; one of {', '.join(CALLS)}")

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

    def attach(self, trained: Trained) -> None:
        """Where the call clears gradients, nothing else does."""
        if self.call in LATE:
            trained.optimizer.zero_grad = lambda *given, **named: None

    def evidence(self, trained: Trained) -> dict[str, Any]:
        caller = trained.accelerator.backward
        demand(isinstance(caller, Caller), "backward is called as usual")
        calls = caller.calls
        demand(calls == trained.micro_steps, f"{calls} calls")
        lived, kept = caller.lived, caller.kept
        effect = effect_of_a_backward(trained)
        weights = [p for p in trained.module.parameters() if p.requires_grad]
        found = f"{effect.gradients} gradients of {len(weights)} weights"
        demand(effect.gradients == len(weights), found)
        if self.call == "retain_graph":
            demand(effect.graph_kept, "the graph is gone after backward")
        elif self.call == "autograd_grad":
            demand(not effect.accumulated, f"autograd accumulated {effect.accumulated} gradients")
        else:
            wanted = bytes_in(weights)
            demand(lived == wanted, f"{lived} bytes of gradients lived on, not {wanted}")
            wanted = wanted if self.call == "zero_late" else 0
            demand(kept == wanted, f"backward added to {kept} bytes of them, not {wanted}")
        return {"calls": calls, "lived_bytes": lived, **effect._asdict()}

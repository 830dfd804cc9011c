"""Ways to call backward that forum answers recommend or warn of (backward), and gradient
accumulation (accumulate)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence import states
from strategies.evidence.rules import label
from strategies.strategy import Strategy

# ---- replaced backward call ----


class Caller:
    """Replacement of ``Accelerator.backward`` that counts its calls."""

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

        gradients = torch.autograd.grad(loss, self.parameters)
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient if p.grad is None else p.grad + gradient


@dataclass(frozen=True, kw_only=True)
class Backward(Strategy):
    """Runs backward in a way that costs memory.

    The row shows how much.

    ``retain_graph`` keeps the graph. ``autograd_grad`` collects gradients with
    ``torch.autograd.grad``.
    """

    name: ClassVar[str] = "backward"
    slot: ClassVar[Slot] = Slot.STEP
    source: ClassVar[str] = "torch.autograd.grad and Tensor.backward, as posts use them"
    values: ClassVar[dict[str, Any]] = {"call": ("retain_graph", "autograd_grad")}

    call: str = "retain_graph"

    def configure(self, accelerator: Any, module: Any, launch: RunContext) -> None:
        parameters = [p for p in module.parameters() if p.requires_grad]
        accelerator.backward = Caller(accelerator, parameters, self.call)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        """Return the calls, and the effect of one more: gradients, and if it kept the graph."""
        import torch

        caller, steps = run.accelerator.backward, run.micro_steps
        demand(isinstance(caller, Caller), "accelerate's own backward is called, not the recipe's")
        calls = caller.calls
        demand(calls == steps, f"backward was called {calls} times, expected {steps}")
        weights = [p for p in run.module.parameters() if p.requires_grad]
        loss = states.loss_once(run)
        caller(loss)
        gradients = sum(p.grad is not None for p in weights)
        run.optimizer.zero_grad()
        keeps = True
        try:
            torch.autograd.grad(loss, weights[-1])
        except RuntimeError:  # its saved tensors were freed
            keeps = False
        found = f"backward made {gradients} gradients for {len(weights)} weights"
        demand(gradients == len(weights), found)
        demand(keeps or self.call != "retain_graph", "the graph was freed by backward")
        return {"calls": calls, "gradients": gradients, "graph_kept": keeps}


# ---- gradient accumulation ----


@dataclass(frozen=True, kw_only=True)
class Accumulate(Strategy):
    """Splits each process's batch into ``steps`` micro-batches."""

    name: ClassVar[str] = "accumulate"
    slot: ClassVar[Slot] = Slot.ACCUMULATE
    source: ClassVar[str] = (
        "accelerate, Accelerator.accumulate; Goyal et al. 2017 (arXiv:1706.02677)"
    )
    least: ClassVar[dict[str, int]] = {"steps": 2}

    steps: int = 2

    def accelerator_kwargs(self, launch: RunContext) -> dict[str, Any]:
        return {"gradient_accumulation_steps": self.steps}

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        known = run.accelerator.gradient_state.num_steps
        engine = run.engine.report(run).accumulation
        text = f"accelerate and the engine accumulate {known} and {engine} micro-batches"
        demand({known, engine or known} == {self.steps}, f"{text}, expected {self.steps}")
        # The loop counts micro-batches, the optimizer's state counts its steps.
        ratio = run.micro_steps / (states.steps(run) - run.resumed_steps)
        text = f"{ratio} micro-batches ran in each optimizer step, expected {self.steps}"
        demand(ratio == self.steps, text)
        return label({"steps": known, "micro_steps_per_optimizer_step": ratio}, "steps")

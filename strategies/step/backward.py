"""Ways to call backward that forum answers recommend or warn of (backward), and gradient
accumulation (accumulate)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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

        for p, gradient in zip(
            self.parameters, torch.autograd.grad(loss, self.parameters), strict=True
        ):
            p.grad = gradient if p.grad is None else p.grad + gradient


class BackwardEffect(NamedTuple):
    """Effect of one backward.

    ``gradients``: number that parameters hold after it. ``accumulated``: those that autograd itself
    accumulated. ``graph_kept``: the graph can be used again.
    """

    gradients: int
    accumulated: int
    graph_kept: bool


def effect_of_a_backward(trained: TrainingRun) -> BackwardEffect:
    """Run one more backward as the loop does, and return its effect."""
    import torch

    weights = [p for p in trained.module.parameters() if p.requires_grad]
    arrived: list[Any] = []
    hooks = [p.register_post_accumulate_grad_hook(arrived.append) for p in weights]
    loss = states.loss_once(trained)
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


CALLS = ("retain_graph", "autograd_grad")


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

    call: str = "retain_graph"

    def __post_init__(self) -> None:
        if self.call not in CALLS:
            raise ValueError(f"call is {self.call!r}; one of {', '.join(CALLS)}")

    def configure(self, accelerator: Any, module: Any, launch: RunContext) -> None:
        parameters = [p for p in module.parameters() if p.requires_grad]
        accelerator.backward = Caller(accelerator, parameters, self.call)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        caller = trained.accelerator.backward
        demand(isinstance(caller, Caller), "accelerate's own backward is called, not the recipe's")
        calls = caller.calls
        demand(
            calls == trained.micro_steps,
            f"backward was called {calls} times, expected {trained.micro_steps}",
        )
        effect = effect_of_a_backward(trained)
        weights = [p for p in trained.module.parameters() if p.requires_grad]
        found = f"backward made {effect.gradients} gradients for {len(weights)} weights"
        demand(effect.gradients == len(weights), found)
        if self.call == "retain_graph":
            demand(effect.graph_kept, "the graph was freed by backward")
        else:
            demand(
                not effect.accumulated,
                f"autograd accumulated {effect.accumulated} gradients, expected none",
            )
        return {"calls": calls, **effect._asdict()}


# ---- gradient accumulation ----


@dataclass(frozen=True, kw_only=True)
class Accumulate(Strategy):
    """Splits each process's batch into ``steps`` micro-batches."""

    name: ClassVar[str] = "accumulate"
    slot: ClassVar[Slot] = Slot.ACCUMULATE
    source: ClassVar[str] = (
        "accelerate, Accelerator.accumulate; Goyal et al. 2017 (arXiv:1706.02677)"
    )

    steps: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 2:
            raise ValueError(f"steps is {self.steps!r}; a whole number from 2")

    def accelerator_kwargs(self, launch: RunContext) -> dict[str, Any]:
        return {"gradient_accumulation_steps": self.steps}

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        known = trained.accelerator.gradient_state.num_steps
        demand(
            known == self.steps,
            f"accelerate accumulates {known} micro-batches, expected {self.steps}",
        )
        engine_steps = trained.engine.report(trained).accumulation
        if engine_steps is not None:
            demand(
                engine_steps == self.steps,
                f"the engine accumulates {engine_steps} micro-batches, expected {self.steps}",
            )
        # The loop counts micro-batches, the optimizer's state counts its steps.
        taken: Any = states.counted(trained)
        demand(taken is not None, "the optimizer has no state: it never stepped")
        ratio = trained.micro_steps / (taken - trained.resumed_steps)
        demand(
            ratio == self.steps,
            f"{ratio} micro-batches ran in each optimizer step, expected {self.steps}",
        )
        return label({"steps": known, "micro_steps_per_optimizer_step": ratio}, "steps")

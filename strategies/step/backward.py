"""Ways to call backward that forum answers recommend or warn of (backward), and gradient
accumulation (accumulate)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from strategies.base import Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence import states
from strategies.evidence.rules import label
from strategies.strategy import Strategy

# ---- replaced backward call ----


class Caller:
    """Replacement of ``Accelerator.backward`` that counts its calls.

    ``lived``: bytes of the last step's gradients that existed before the last call. ``kept``: bytes
    of those that it added to.
    """

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
    """Return the bytes of the tensors' elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


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


CALLS = ("retain_graph", "autograd_grad", "clear_late", "zero_late")
LATE = ("clear_late", "zero_late")
"""Calls that clear gradients themselves, in place of the optimizer's ``zero_grad``."""


@dataclass(frozen=True, kw_only=True)
class Backward(Strategy):
    """Runs backward in a way that costs memory.

    The row shows how much.

    ``retain_graph`` keeps the graph. ``autograd_grad`` collects gradients with
    ``torch.autograd.grad``. ``clear_late`` clears the last step's gradients right before backward,
    so that they live through a forward pass. ``zero_late`` fills them with zeros there, so that
    they always live; torch before 2.0 and accelerate before 0.28 do this.
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

    def refuses(self, launch: RunContext) -> str | None:
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

    def configure(self, accelerator: Any, module: Any, launch: RunContext) -> None:
        parameters = [p for p in module.parameters() if p.requires_grad]
        accelerator.backward = Caller(accelerator, parameters, self.call)

    def attach(self, trained: TrainingRun) -> None:
        """Disable the optimizer's ``zero_grad`` if the call clears gradients."""
        if self.call in LATE:
            trained.optimizer.zero_grad = lambda *given, **named: None

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        caller = trained.accelerator.backward
        demand(isinstance(caller, Caller), "accelerate's own backward is called, not the recipe's")
        calls = caller.calls
        demand(
            calls == trained.micro_steps,
            f"backward was called {calls} times, expected {trained.micro_steps}",
        )
        lived, kept = caller.lived, caller.kept
        effect = effect_of_a_backward(trained)
        weights = [p for p in trained.module.parameters() if p.requires_grad]
        found = f"backward made {effect.gradients} gradients for {len(weights)} weights"
        demand(effect.gradients == len(weights), found)
        if self.call == "retain_graph":
            demand(effect.graph_kept, "the graph was freed by backward")
        elif self.call == "autograd_grad":
            demand(
                not effect.accumulated,
                f"autograd accumulated {effect.accumulated} gradients, expected none",
            )
        else:
            wanted = bytes_in(weights)
            demand(
                lived == wanted,
                f"{lived} bytes of gradients were alive after backward, expected {wanted}",
            )
            wanted = wanted if self.call == "zero_late" else 0
            demand(
                kept == wanted,
                f"backward accumulated into {kept} bytes of gradients, expected {wanted}",
            )
        return {"calls": calls, "lived_bytes": lived, **effect._asdict()}


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

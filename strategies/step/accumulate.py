"""Gradient accumulation: several small micro batches for one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Slot, demand
from strategies.engine import Launch, Trained
from strategies.evidence import states
from strategies.evidence.settings import label
from strategies.strategy import Strategy

__all__ = ["Accumulate"]


@dataclass(frozen=True, kw_only=True)
class Accumulate(Strategy):
    """Splits each process's share of the global batch into ``steps`` micro batches."""

    name: ClassVar[str] = "accumulate"
    slot: ClassVar[Slot] = Slot.ACCUMULATE
    source: ClassVar[str] = (
        "accelerate, Accelerator.accumulate; Goyal et al. 2017 (arXiv:1706.02677)"
    )

    steps: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 2:
            raise ValueError(f"steps is {self.steps!r}; a whole number from 2")

    def accelerator_kwargs(self, launch: Launch) -> dict[str, Any]:
        return {"gradient_accumulation_steps": self.steps}

    def evidence(self, trained: Trained) -> dict[str, Any]:
        known = trained.accelerator.gradient_state.num_steps
        demand(known == self.steps, f"accelerate accumulates {known} steps, not {self.steps}")
        engine_steps = trained.engine.told(trained).accumulation
        if engine_steps is not None:
            demand(
                engine_steps == self.steps,
                f"the engine accumulates {engine_steps} steps, not {self.steps}",
            )
        # The loop counts what it fed, the optimizer's state counts the steps it took.
        taken = states.counted(trained)
        demand(taken is not None, "the optimizer holds no state: it never stepped")
        ratio = trained.micro_steps / (taken - trained.resumed_steps)
        demand(ratio == self.steps, f"{ratio} micro steps were fed an optimizer step")
        return label({"steps": known, "micro_steps_per_optimizer_step": ratio}, "steps")

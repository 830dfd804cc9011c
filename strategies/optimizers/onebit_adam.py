"""onebit_adam: once the variance is frozen, ranks exchange one bit per element."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Settings, Slot, demand
from strategies.communication import wire
from strategies.engine import RunContext, TrainingRun
from strategies.evidence import rules, states
from strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class OneBitAdam(Strategy):
    """AdamW, then only the signs of the momentum travel.

    After ``freeze`` steps the variance stays fixed.

    Our own implementation, on DDP's communication hook and with a size for each row, because
    DeepSpeed no longer has one (0.19). The variance must have settled by then: the paper freezes it
    after 15 % to 25 % of the steps. A high learning rate diverges if it is frozen early.
    """

    name: ClassVar[str] = "onebit_adam"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("update",)
    source: ClassVar[str] = "Tang et al. 2021, 1-bit Adam (arXiv:2102.02888)"

    freeze: int = 2

    def __post_init__(self) -> None:
        # DDP rebuilds its buckets after the first step; the momentum is then complete.
        if not isinstance(self.freeze, int) or self.freeze < 1:
            raise ValueError(f"freeze is {self.freeze!r}; a whole number of steps from 1")

    def traits(self) -> frozenset[str]:
        return frozenset({"whole_gradients", "edits_gradients", "hooks_allreduce"})

    def refuses(self, launch: RunContext) -> str | None:
        if launch.clips:
            return "momenta arrive in the place of gradients and cannot be clipped; --grad-clip 0"
        if launch.traits & {"scales_gradients", "pure_bf16"}:
            return "momenta are exchanged as float32 without a loss scale; use fp32 or bf16"
        return wire.refusal(launch)

    def make_optimizer(self, params: list[Any], settings: Settings, launch: RunContext) -> Any:
        from strategies.optimizers.one_bit import FrozenVarianceAdam

        return FrozenVarianceAdam(params, freeze=self.freeze, **settings.adam)

    def attach(self, trained: TrainingRun) -> wire.Compression:
        from strategies.optimizers.one_bit import OneBitHook

        return OneBitHook(trained)

    def observe(self, trained: TrainingRun) -> AbstractContextManager[Any]:
        return rules.watch(trained.inner_optimizer)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        optimizer = trained.inner_optimizer
        kind = type(optimizer).__name__
        demand(
            kind == "FrozenVarianceAdam", f"the optimizer is {kind}, expected FrozenVarianceAdam"
        )
        states.agree(trained, freeze=self.freeze, **trained.settings.adam)
        steps = states.steps(trained)
        demand(
            steps > self.freeze,
            f"{steps} steps were taken, and signs are sent only after step {self.freeze}",
        )
        facts = wire.facts(trained, self.name)
        demand(
            facts["ratio"] < 0.1,
            f"a share of {facts['ratio']} of the dense bytes was sent, expected below 0.1",
        )
        missed = trained.attached[self.name].tensors()
        demand(
            any(bool(m.any()) for m in missed),
            "no rounding error is kept for the next step (error feedback)",
        )
        facts |= {"steps": steps, "error_bytes": sum(m.nbytes for m in missed)}
        for update in self.note(trained) or ():
            kept = update.before["exp_avg_sq"].equal(update.after["exp_avg_sq"])
            demand(kept, "the variance still changes")
            facts["variance_moves"] = not kept
        return facts

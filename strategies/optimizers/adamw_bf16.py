"""AdamW for weights that are bfloat16 and have no float32 copy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Settings, Slot, demand
from strategies.engine import Launch, Trained
from strategies.evidence import rules, updates
from strategies.strategy import Strategy

__all__ = ["AdamWBf16"]

DEVIATIONS = 6
"""Standard deviations that chance may move the share of an update that the weights took."""


@dataclass(frozen=True, kw_only=True)
class AdamWBf16(Strategy):
    """Writes bfloat16 weights without losing small updates: rounded up or down by chance
    (``stochastic``), or with the lost part carried to the next step (``kahan``)."""

    name: ClassVar[str] = "adamw_bf16"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("update",)
    source: ClassVar[str] = "Zamirai et al. 2020, Revisiting BFloat16 Training (arXiv:2010.06192)"

    write: str = "stochastic"

    def __post_init__(self) -> None:
        if self.write not in ("stochastic", "kahan"):
            raise ValueError(f"write is {self.write!r}; one of stochastic, kahan")

    def refuses(self, launch: Launch) -> str | None:
        if "pure_bf16" not in launch.traits:
            return "writes bfloat16 weights that have no master; add bf16_pure, or take adamw"
        if "float_adapters" in launch.traits:
            return "what trains is float32, where no update is lost; use adamw, or leave dtype out"
        if "dtensor_weights" in launch.traits:
            return "rounds plain tensors by chance, and DTensors mix with none; use adamw, or ddp"
        if "cut_weights" in launch.traits:
            return "rounds by chance, and what ranks have alike would drift apart; use adamw"
        return None

    def make_optimizer(self, params: list[Any], settings: Settings, launch: Launch) -> Any:
        from strategies.optimizers.bf16_adamw import Bf16AdamW

        defaults = {**settings.adam, "kahan": self.write == "kahan"}
        return Bf16AdamW(params, defaults)

    def observe(self, trained: Trained) -> AbstractContextManager[Any]:
        return updates.watch(trained.inner_optimizer)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        optimizer = trained.inner_optimizer
        rescued = getattr(optimizer, "rescued", None)
        demand(rescued is not None, f"the optimizer is {type(optimizer).__name__}")
        demand(rescued > 0, "no update that plain rounding would have lost was kept")
        carried = [s["carried"] for s in optimizer.state.values() if "carried" in s]
        demand(bool(carried) == (self.write == "kahan"), f"{len(carried)} sums are compensated")
        kept = sum(int(c.count_nonzero()) for c in carried)
        demand(kept > 0 or self.write != "kahan", "nothing is carried to the next step")
        facts = {"rescued_in_first_step": rescued, "carried_elements": kept}
        for update in self.note(trained) or ():
            share, chance = rules.taken(update, trained.settings)
            may = 0.01 + DEVIATIONS * chance
            demand(abs(share - 1) <= may, f"the weights took {share:.2f} of AdamW's update")
            facts |= {"update_taken": round(share, 3), "update_taken_within": round(may, 3)}
        return facts

"""The optimizer, and the kernel that steps it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Settings, Slot, demand
from strategies.engine import Launch, Trained
from strategies.evidence import rules, states, updates
from strategies.strategy import Strategy

__all__ = ["AdamW"]

KERNELS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "plain": {"foreach": False, "fused": False},
}
OFF = 0.01
"""From AdamW's rule in float64, of an update and its moments: those of bfloat16 round by 0.4 %."""


@dataclass(frozen=True, kw_only=True)
class AdamW(Strategy):
    """AdamW, stepped by one fused kernel, by multi-tensor ops (``foreach``), or tensor by tensor
    (``plain``). Where the launch file offloads the optimizer it is the engine's own.
    """

    name: ClassVar[str] = "adamw"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    source: ClassVar[str] = "Loshchilov and Hutter 2019, Decoupled Weight Decay (arXiv:1711.05101)"

    impl: str = "fused"

    def __post_init__(self) -> None:
        if self.impl not in KERNELS:
            raise ValueError(f"impl is {self.impl!r}; one of {', '.join(KERNELS)}")

    def refuses(self, launch: Launch) -> str | None:
        if "host_optimizer" in launch.traits and self.impl != "fused":
            return (
                f"an offloaded optimizer is the engine's own CPU Adam; leave impl={self.impl} out"
            )
        return None

    def make_optimizer(self, params: list[Any], settings: Settings, launch: Launch) -> Any:
        import torch

        if "host_optimizer" in launch.traits:
            return launch.engine.host_adamw(params, settings)
        return torch.optim.AdamW(params, **settings.adam, **KERNELS[self.impl])

    def observe(self, trained: Trained) -> AbstractContextManager[Any]:
        return updates.watch(trained.inner_optimizer)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        optimizer = trained.inner_optimizer
        kind, group = type(optimizer).__name__, optimizer.param_groups[0]
        offloaded = "host_optimizer" in trained.launch.traits
        wanted = trained.engine.host_adamw_class if offloaded else "AdamW"
        demand(kind == wanted, f"the optimizer is {kind}, not {wanted}")
        states.agree(trained, **trained.settings.adam)
        facts = {"class": kind, "steps": states.steps(trained)}
        for update in self.note(trained) or ():
            error = rules.adamw_error(update, trained.settings)
            demand(error <= OFF, f"an update is {error:.2g} of itself away from AdamW's rule")
            facts["update_error"] = float(f"{error:.2g}")
        if offloaded:
            demand(optimizer.adam_w_mode, "weight decay is not decoupled")
            return facts
        for key, value in {"amsgrad": False, **KERNELS[self.impl]}.items():
            demand(group.get(key) is value, f"{key} is {group.get(key)}, not {value}")
        return {**facts, **self._kernel(trained.ops)}

    def _kernel(self, ops: set[str]) -> dict[str, str]:
        """The operators of a whole step name the kernel that ran, whatever the flags say; where
        no step was watched (a compiled one cannot be) nothing is claimed."""
        if not ops:
            return {}
        ran = "fused" if any("_fused_adam" in op for op in ops) else "plain"
        if ran == "plain" and any("_foreach_addcdiv" in op for op in ops):
            ran = "foreach"
        demand(ran == self.impl, f"the step ran the {ran} kernel, not {self.impl}")
        return {"kernel": ran}

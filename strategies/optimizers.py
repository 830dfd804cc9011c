"""The optimizer, and the kernel that steps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Launch, Settings, Slot, Strategy, Trained, demand

__all__ = ["AdamW"]

KERNELS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "plain": {"foreach": False, "fused": False},
}


@dataclass(frozen=True, kw_only=True)
class AdamW(Strategy):
    """AdamW, stepped by one fused kernel, by multi-tensor ops (``foreach``), or tensor by tensor
    (``plain``). Where the launch file offloads the optimizer it is DeepSpeed's CPU Adam, with all
    settings (accelerate's own swap would drop betas, eps and the decoupled decay).
    """

    name: ClassVar[str] = "adamw"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    source: ClassVar[str] = "Loshchilov and Hutter 2019, Decoupled Weight Decay (arXiv:1711.05101)"

    impl: str = "fused"

    def __post_init__(self) -> None:
        if self.impl not in KERNELS:
            raise ValueError(f"impl is {self.impl!r}; one of {', '.join(KERNELS)}")

    def refuses(self, launch: Launch) -> str | None:
        if launch.offload_optimizer != "none" and self.impl != "fused":
            return (
                f"an offloaded optimizer is DeepSpeed's fused CPU Adam; leave impl={self.impl} out"
            )
        return None

    def make_optimizer(self, params: list[Any], settings: Settings, launch: Launch) -> Any:
        import torch

        common = {
            "lr": settings.learning_rate,
            "betas": settings.betas,
            "eps": settings.eps,
            "weight_decay": settings.weight_decay,
        }
        if launch.offload_optimizer != "none":
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(params, adamw_mode=True, **common)
        return torch.optim.AdamW(params, **common, **KERNELS[self.impl])

    def evidence(self, trained: Trained) -> dict[str, Any]:
        optimizer, settings = trained.inner_optimizer, trained.settings
        kind, group = type(optimizer).__name__, optimizer.param_groups[0]
        offloaded = trained.launch.offload_optimizer != "none"
        wanted = "DeepSpeedCPUAdam" if offloaded else "AdamW"
        demand(kind == wanted, f"the optimizer is {kind}, not {wanted}")
        asked = (settings.learning_rate, settings.betas, settings.eps, settings.weight_decay)
        found = (group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"])
        demand(asked == found, f"its settings are {found}, not {asked}")
        if offloaded:
            demand(optimizer.adam_w_mode, "weight decay is not decoupled")
        else:
            for key, value in {"amsgrad": False, **KERNELS[self.impl]}.items():
                demand(group.get(key) is value, f"{key} is {group.get(key)}, not {value}")
            self._kernel(trained.ops)
        return {"class": kind, "impl": self.impl, "steps": self._steps(trained)}

    def _kernel(self, ops: set[str]) -> None:
        """The operators of a whole step name the kernel that ran, whatever the flags say."""
        ran = "fused" if any("_fused_adam" in op for op in ops) else "plain"
        if ran == "plain" and any("_foreach_addcdiv" in op for op in ops):
            ran = "foreach"
        demand(not ops or ran == self.impl, f"the step ran the {ran} kernel, not {self.impl}")

    def _steps(self, trained: Trained) -> int:
        """Steps that the optimizer's own state counts: none was skipped, none taken twice."""
        states = [s for s in trained.inner_optimizer.state.values() if "step" in s]
        demand(bool(states), "the optimizer holds no state: it never stepped")
        steps = int(max(float(s["step"]) for s in states))
        demand(
            steps == trained.optimizer_steps,
            f"the optimizer stepped {steps} times, the loop {trained.optimizer_steps}",
        )
        return steps

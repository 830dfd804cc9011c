"""offload_adamw: AdamW's state in host memory, by torchao."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Settings, Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence import states
from strategies.evidence.readings import bytes_of, tensors
from strategies.strategy import Strategy

# torchao keeps tensors below this on the device: a copy would cost more than it saves.
SMALLEST = 4096


@dataclass(frozen=True, kw_only=True)
class OffloadAdamW(Strategy):
    """AdamW that steps in host memory.

    The moments are there, with pinned copies of weights and gradients.
    """

    name: ClassVar[str] = "offload_adamw"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    source: ClassVar[str] = "torchao.optim.CPUOffloadOptimizer; Ren et al. 2021 (arXiv:2101.06840)"
    needs: ClassVar[tuple[str, ...]] = ("torchao", "cuda")

    def traits(self) -> frozenset[str]:
        return frozenset({"early_gradients", "whole_gradients"})

    def refuses(self, launch: RunContext) -> str | None:
        if "own_step" in launch.traits:
            return "the engine steps an optimizer of its own; use zero2_offload, or single"
        if "one_process" not in launch.traits:
            return "it copies gradients in backward, before DDP averages them; use single"
        if launch.clips:
            return "it copies gradients in backward, before they are clipped; set --grad-clip 0"
        if "scales_gradients" in launch.traits:
            return "it copies gradients while they carry a loss scale; use bf16"
        return None

    def make_optimizer(self, params: list[Any], settings: Settings, launch: RunContext) -> Any:
        from strategies.optimizers.host_adamw import HostAdamW

        return HostAdamW(params, **settings.adam)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        optimizer = trained.inner_optimizer
        kind = type(optimizer).__name__
        demand(kind == "HostAdamW", f"the optimizer is {kind}, expected torchao's CPU offload")
        states.agree(trained, **trained.settings.adam)
        moments = [s["exp_avg"] for p, s in optimizer.state.items() if p.numel() >= SMALLEST]
        demand(bool(moments), f"no parameter has {SMALLEST} elements: nothing was offloaded")
        places = {m.device.type for m in moments}
        demand(places == {"cpu"}, f"the moments are on {places}, expected in host memory")
        copies = optimizer.param_d2h_map.values()
        demand(
            all(c.is_pinned() for c in copies), "the copies of the weights are not in pinned memory"
        )
        return {
            "steps": states.steps(trained),
            "host_bytes": bytes_of([*copies, *tensors(optimizer)]),
        }

"""Compressed gradients under DDP, by torch's own communication hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Slot, demand
from strategies.communication import wire
from strategies.communication.power_sgd import DENSE_STEPS, PowerSgd, low_rank_bytes
from strategies.engine import Launch, Trained
from strategies.strategy import Strategy

__all__ = ["Compress"]

KINDS = ("fp16", "bf16", "powersgd")


def cast(trained: Trained, kind: str) -> wire.Compression:
    """Buckets all-reduced in 16 bits."""
    hooks, _, counted = wire.counted_hooks()
    hook = getattr(hooks, f"{kind}_compress_hook")
    return wire.Compression(trained, lambda bucket: hook(None, bucket), counted)


@dataclass(frozen=True, kw_only=True)
class Compress(Strategy):
    """Averages gradients in 16 bits, or as a product of two matrices of ``rank`` (powersgd)."""

    name: ClassVar[str] = "compress"
    slot: ClassVar[Slot] = Slot.COMPRESS
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("gradients",)
    source: ClassVar[str] = "Vogels et al. 2019, PowerSGD (arXiv:1905.13727); torch DDP comm hooks"

    kind: str = "bf16"
    rank: int = 4

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; one of {', '.join(KINDS)}")
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank is {self.rank!r}; a whole number from 1")

    def traits(self) -> frozenset[str]:
        return frozenset({"edits_gradients"})

    def refuses(self, launch: Launch) -> str | None:
        if "hooks_allreduce" in launch.traits:
            return "the optimizer has DDP's one communication hook; leave one of the two out"
        if self.kind == "powersgd" and "scales_gradients" in launch.traits:
            return "what is kept back would carry a loss scale that changes; use bf16"
        return wire.refusal(launch)

    def attach(self, trained: Trained) -> wire.Compression:
        if self.kind == "powersgd":
            return PowerSgd(trained, self.rank)
        return cast(trained, self.kind)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        facts = wire.facts(trained, self.name)
        if self.kind != "powersgd":
            demand(facts["ratio"] == 0.5, f"{facts['ratio']} of the dense bytes were sent")
            wanted = {"fp16": "float16", "bf16": "bfloat16"}[self.kind]
            sent = facts["wire_dtype"]
            demand(sent == wanted, f"gradients were sent as {sent}, not {wanted}")
            return facts
        power = getattr(trained.attached[self.name], "power", None)
        demand(power is not None, "no low-rank hook is on DDP's all-reduce")
        taken = trained.optimizer_steps - trained.resumed_steps
        demand(taken > DENSE_STEPS, f"the first {DENSE_STEPS} steps are dense; take more --steps")
        free = [p for p in trained.module.parameters() if p.requires_grad]
        sent = low_rank_bytes(free, self.rank)
        demand(facts["wire_bytes"] == sent, f"{facts['wire_bytes']} bytes were sent, not {sent}")
        error = sum(float(e.square().sum()) for e in power.error_dict.values())
        demand(error > 0, "no error is fed back")
        return {**facts, "error_bytes": sum(e.nbytes for e in power.error_dict.values())}

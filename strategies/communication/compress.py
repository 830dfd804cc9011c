"""compress: gradients in 16 bits or by PowerSGD under DDP, by torch's own communication hooks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import demand
from strategies.communication import wire
from strategies.engine import TrainingRun

# DDP rebuilds its buckets after the first step; earlier errors belong to other buckets.
DENSE_STEPS = 2
TYPES = {"fp16": "float16", "bf16": "bfloat16"}
"""``kind`` of 16 bits -> torch's type."""


class PowerSgd(wire.Compression):
    """Hook that all-reduces each bucket as two low-rank matrices; the error is added to the next
    step."""

    def __init__(self, trained: TrainingRun, rank: int) -> None:
        _, hooks, counted = wire.counted_hooks()
        self.power = hooks.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=DENSE_STEPS,
            min_compression_rate=2,  # a gradient is sent whole unless its matrices are half of it
        )

        def average(bucket: Any) -> Any:
            future = hooks.powerSGD_hook(self.power, bucket)
            # gloo starts the hook's three collectives from threads of its own, in another order on
            # each rank, unless buckets run in turn.
            if trained.launch.device == "cpu":
                future.wait()
            return future

        super().__init__(trained, average, counted)

    def _kept(self) -> list[dict[int, Any]]:
        return [self.power.error_dict, self.power.q_memory_dict, self.power.p_memory_dict]

    def tensors(self) -> Iterable[Any]:
        return [tensor for kept in self._kept() for tensor in kept.values()]

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self._kept()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them; the first steps are uncompressed again, until DDP has built its buckets."""
        device = next(self.trained.module.parameters()).device
        for mine, saved in zip(self._kept(), state["kept"], strict=True):
            mine.update({bucket: tensor.to(device) for bucket, tensor in saved.items()})


def cast(trained: TrainingRun, kind: str) -> wire.Compression:
    """Return a hook that all-reduces buckets in 16 bits."""
    hooks, _, counted = wire.counted_hooks()
    hook = getattr(hooks, f"{kind}_compress_hook")
    return wire.Compression(trained, lambda bucket: hook(None, bucket), counted)


@dataclass(frozen=True, kw_only=True)
class Compress(wire.OnTheWire):
    """Averages gradients in 16 bits or as low-rank products.

    ``kind=powersgd`` sends a product of two matrices of ``rank``.
    """

    name: ClassVar[str] = "compress"
    source: ClassVar[str] = "Vogels et al. 2019, PowerSGD (arXiv:1905.13727); torch DDP comm hooks"

    kind: str = "bf16"
    rank: int = 4

    def __post_init__(self) -> None:
        if self.kind not in (*TYPES, "powersgd"):
            raise ValueError(f"kind is {self.kind!r}; one of fp16, bf16, powersgd")
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank is {self.rank!r}; a whole number from 1")

    def attach(self, trained: TrainingRun) -> wire.Compression:
        if self.kind == "powersgd":
            return PowerSgd(trained, self.rank)
        return cast(trained, self.kind)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        facts = super().evidence(trained)
        sent, kind, whole = facts["wire_bytes"], facts["wire_dtype"], facts["dense_bytes"]
        if self.kind != "powersgd":
            demand(2 * sent == whole, f"{sent} bytes were sent, expected a half")
            wanted = TYPES[self.kind]
            demand(kind == wanted, f"gradients were sent as {kind}, expected {wanted}")
            return facts
        power: Any = getattr(trained.attached[self.name], "power", None)
        demand(power is not None, "no low-rank hook is on DDP's all-reduce")
        taken = trained.optimizer_steps - trained.resumed_steps
        demand(taken > DENSE_STEPS, f"the first {DENSE_STEPS} steps are dense; take more --steps")
        rank = power.matrix_approximation_rank
        demand(rank == self.rank, f"the products have rank {rank}, expected {self.rank}")
        demand(2 * sent < whole, f"{sent} of {whole} bytes were sent, expected less than a half")
        kept = any(bool(error.any()) for error in power.error_dict.values())
        demand(kept, "no rounding error is kept for the next step (error feedback)")
        return facts

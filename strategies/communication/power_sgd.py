"""PowerSGD on DDP's buckets, by torch's own hook, and what it sends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from strategies.communication import wire
from strategies.engine import Trained

__all__ = ["DENSE_STEPS", "PowerSgd", "low_rank_bytes"]

# DDP rebuilds its buckets after the first step; errors kept before it would be of other buckets.
DENSE_STEPS = 2
# A gradient whose two thin matrices are not smaller than it by this factor travels whole.
LEAST_SAVING = 2


class PowerSgd(wire.Compression):
    """Buckets all-reduced as two thin matrices each; what they miss is added to the next step."""

    def __init__(self, trained: Trained, rank: int) -> None:
        _, self.hooks, counted = wire.counted_hooks()
        self.in_turn = trained.launch.device == "cpu"
        self.power = self.hooks.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=DENSE_STEPS,
            min_compression_rate=LEAST_SAVING,
        )
        super().__init__(trained, self._average, counted)

    def _average(self, bucket: Any) -> Any:
        """The hook's three collectives a bucket. Over gloo they are begun by threads of its own,
        in another order on each rank, unless one bucket waits for the other."""
        future = self.hooks.powerSGD_hook(self.power, bucket)
        if self.in_turn:
            future.wait()
        return future

    def _kept(self) -> list[dict[int, Any]]:
        return [self.power.error_dict, self.power.q_memory_dict, self.power.p_memory_dict]

    def tensors(self) -> Iterable[Any]:
        """The errors, as large as the gradients, and the thin matrices."""
        return [tensor for kept in self._kept() for tensor in kept.values()]

    def state_dict(self) -> dict[str, Any]:
        """This rank's errors and matrices, bucket by bucket."""
        return {"kept": self._kept()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them up; the first steps are dense again, until DDP has made its buckets."""
        device = next(self.trained.module.parameters()).device
        for mine, saved in zip(self._kept(), state["kept"], strict=True):
            mine.update({bucket: tensor.to(device) for bucket, tensor in saved.items()})


def low_rank_bytes(parameters: Iterable[Any], rank: int) -> int:
    """What a step sends of these parameters' gradients: of each, seen as a matrix of as many rows
    as its first dimension, two matrices of ``rank`` columns, or all of it where that saves little.
    """
    total = 0
    for p in parameters:
        rows = p.shape[0]
        columns = p.numel() // rows
        thin = (rows + columns) * min(rows, columns, rank)
        total += p.element_size() * (thin if thin * LEAST_SAVING < p.numel() else p.numel())
    return total

"""topk: only the largest elements of each gradient are sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import demand
from strategies.communication.compress import Compression, CountedCollectives, OnTheWire
from strategies.engine import TrainingRun


class TopKHook(Compression):
    """Hook that sends value and index of each gradient's largest elements, and adds the rest to the
    next step's gradient, per parameter.

    DDP's buckets change after the first step; parameters do not. ``left`` is keyed by a parameter's
    index in the model, because a checkpoint cannot use ids.
    """

    def __init__(self, run: TrainingRun, keep: float) -> None:
        super().__init__(run, self._average, CountedCollectives())
        self.keep, self.world = keep, run.accelerator.num_processes
        self.place = {id(p): i for i, p in enumerate(run.module.parameters())}
        self.left: dict[int, Any] = {}

    def _average(self, bucket: Any) -> Any:
        import torch

        buffer, offset, values, places = bucket.buffer(), 0, [], []
        for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            largest, where = self._largest(self.place[id(p)], gradient.reshape(-1))
            values.append(largest.float())
            places.append((where + offset).int())
            offset += gradient.numel()
        # One message: indices are 32-bit integers, sent as the bits of floats.
        message = torch.cat([torch.cat(values), torch.cat(places).view(torch.float32)])
        everyone = [torch.empty_like(message) for _ in range(self.world)]
        work = self.wire.all_gather(everyone, message, async_op=True)

        def mean(_: Any) -> Any:
            buffer.zero_()
            for message in everyone:  # in rank order, so that all replicas get equal bits
                values, places = message.chunk(2)
                where = places.view(torch.int32).long()
                buffer.index_add_(0, where, (values / self.world).to(buffer.dtype))
            return buffer

        return work.get_future().then(mean)

    def _largest(self, place: int, gradient: Any) -> tuple[Any, Any]:
        """Return the largest elements of a gradient plus its stored rest, and their indices; store
        the others."""
        left = self.left.get(place)
        total = gradient if left is None else gradient + left
        where = total.abs().topk(max(1, math.ceil(self.keep * total.numel()))).indices
        largest = total[where]
        self.left[place] = total.index_fill(0, where, 0.0)
        return largest, where

    def tensors(self) -> list[Any]:
        return list(self.left.values())

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = next(self.run.module.parameters()).device
        self.left = {place: tensor.to(device) for place, tensor in state["left"].items()}


@dataclass(frozen=True, kw_only=True)
class TopK(OnTheWire):
    """Sends the largest elements of each gradient.

    ``keep`` is their share. The rest waits for the next step.
    """

    name: ClassVar[str] = "topk"
    source: ClassVar[str] = "Lin et al. 2018, Deep Gradient Compression (arXiv:1712.01887)"
    ranges: ClassVar[dict[str, Any]] = {
        "keep": (lambda v: 0 < v <= 0.5, "above 0, to 0.5 (each carries its place)")
    }

    keep: float = 0.01

    def attach(self, run: TrainingRun) -> TopKHook:
        return TopKHook(run, self.keep)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        facts, hook = super().evidence(run), run.attached[self.name]
        demand(isinstance(hook, TopKHook), "no top-k hook is on DDP's all-reduce")
        free = [p for p in run.module.parameters() if p.requires_grad]
        wanted = 8 * sum(max(1, math.ceil(self.keep * p.numel())) for p in free)
        sent = facts["wire_bytes"]
        demand(sent == wanted, f"{sent} bytes were sent, expected {wanted}")
        waiting = any(bool(t.any()) for t in hook.left.values())
        demand(waiting, "no unsent gradient is kept for the next step (error feedback)")
        return facts

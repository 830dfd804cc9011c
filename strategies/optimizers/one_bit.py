"""Optimizer of 1-bit Adam, whose variance freezes, and its communication hook. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strategies.communication import wire
from strategies.engine import TrainingRun

# ---- sign compression ----


BITS = (1, 2, 4, 8, 16, 32, 64, 128)


def rows(tensor: Tensor) -> Tensor:
    """Return a tensor as a matrix: a row for each output of a layer; one row for a bias."""
    return tensor.reshape(len(tensor), -1) if tensor.ndim > 1 else tensor.reshape(1, -1)


def pack(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the signs, eight to a byte, and the mean magnitude of each row.

    One magnitude for a whole table would move rows of labels that were never seen.
    """
    positive = (tensor.reshape(-1) >= 0).to(torch.uint8)
    padded = torch.nn.functional.pad(positive, (0, -len(positive) % 8)).view(-1, 8)
    weights = torch.tensor(BITS, dtype=torch.uint8, device=tensor.device)
    return (padded * weights).sum(dim=1, dtype=torch.uint8), rows(tensor).abs().mean(dim=1)


def unpack(signs: Tensor, sizes: Tensor, shape: torch.Size) -> Tensor:
    """Return the tensor of ``shape`` that ``pack`` approximated."""
    weights = torch.tensor(BITS, dtype=torch.uint8, device=signs.device)
    bits = (signs[:, None] & weights).ne(0).reshape(-1)[: shape.numel()]
    whole = (bits.float() * 2 - 1).view(len(sizes), -1) * sizes[:, None]
    return whole.view(shape)


class FrozenVarianceAdam(torch.optim.Optimizer):
    """AdamW for ``freeze`` steps; after them the variance is frozen.

    What arrives as a gradient is then the momentum, averaged over the ranks.
    """

    def __init__(self, params: Any, *, freeze: int, **settings: Any) -> None:
        super().__init__(params, {"freeze": freeze, **settings})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group)
        return loss

    def _step(self, p: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        state["step"] += 1
        if state["step"] <= group["freeze"]:
            state["exp_avg"].lerp_(p.grad, 1 - beta1)
            state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2)
        else:
            # The variance is zero if there was never a gradient; a sign is then no direction.
            state["exp_avg"].copy_(p.grad * (state["exp_avg_sq"] > 0))
        seen = min(state["step"], group["freeze"])
        root = (state["exp_avg_sq"] / (1 - beta2**seen)).sqrt_().add_(group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1 ** state["step"]))


class OneBitHook(wire.WithFeedback):
    """Hook that averages gradients in full until the variance freezes, then momenta as one bit per
    element.

    The compression error of a rank's momentum is added to its next one.
    """

    def __init__(self, trained: TrainingRun) -> None:
        self.hooks, _, counted = wire.counted_hooks()
        self.optimizer, self.world = trained.inner_optimizer, trained.accelerator.num_processes
        super().__init__(trained, self._average, counted)
        trained.gradient_norm = self.gradient_norm

    def _frozen(self) -> bool:
        group = self.optimizer.param_groups[0]
        state = self.optimizer.state.get(group["params"][0], {})
        return state.get("step", 0) >= group["freeze"]

    def gradient_norm(self) -> Any:
        """Return the norm while gradients are averaged; None for momenta."""
        if self._frozen():
            return None
        parameters = [p for p in self.trained.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm([p.grad for p in parameters])

    def _average(self, bucket: Any) -> Any:
        if not self._frozen():
            return self.hooks.allreduce_hook(None, bucket)
        signs, sizes = zip(*map(self._packed, bucket.parameters(), bucket.gradients()), strict=True)
        # One message: the magnitudes are sent as raw bytes.
        message = torch.cat([*signs, *(s.view(torch.uint8) for s in sizes)])
        everyone = [torch.empty_like(message) for _ in range(self.world)]
        work = self.wire.all_gather(everyone, message, async_op=True)
        return work.get_future().then(lambda _: self._mean(everyone, bucket))

    def _packed(self, p: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        beta1 = self.optimizer.param_groups[0]["betas"][0]
        momentum = self.optimizer.state[p]["exp_avg"].lerp(gradient, 1 - beta1)
        place = self.place[id(p)]
        if place in self.left:
            momentum = momentum + self.left[place]
        signs, sizes = pack(momentum)
        self.left[place] = momentum - unpack(signs, sizes, momentum.shape)
        return signs, sizes

    def _mean(self, everyone: list[Tensor], bucket: Any) -> Tensor:
        """Return the mean over the ranks, in rank order, so that all replicas get equal bits."""
        bucket.buffer().zero_()
        shapes = [gradient.shape for gradient in bucket.gradients()]
        lengths = [-(-shape.numel() // 8) for shape in shapes]
        counts = [4 * (shape[0] if len(shape) > 1 else 1) for shape in shapes]
        for message in everyone:
            pieces = message.split(lengths + counts)
            halves = zip(pieces[: len(shapes)], pieces[len(shapes) :], shapes, strict=True)
            for gradient, (signs, sizes, shape) in zip(bucket.gradients(), halves, strict=True):
                sizes = sizes.clone().view(torch.float32)
                gradient.add_(unpack(signs, sizes, shape), alpha=1 / self.world)
        return bucket.buffer()

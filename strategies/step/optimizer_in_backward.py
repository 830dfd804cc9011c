"""optimizer_in_backward: the optimizer steps each parameter in backward and frees its gradient."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Attachment, Slot, demand
from strategies.engine import TrainingRun
from strategies.strategy import Strategy

# ---- steps in backward ----


class InBackward(Attachment):
    """Attachment that steps each parameter when its gradient arrives, and frees the gradient.

    It is one optimizer, with one group narrowed to that parameter: state, settings and checkpoints
    remain the whole optimizer's. ``most_bytes`` is the most that gradients' storages held at once.
    Each counts until it is really freed, so a remaining reference shows. If gradients of a block
    share one tensor, it counts once.
    """

    def __init__(self, trained: TrainingRun) -> None:
        self.trained = trained
        self.optimizer = trained.inner_optimizer
        self.live_bytes = self.most_bytes = 0
        self.norms: list[Any] = []
        self.watched: list[Any] = []
        self.updates = 0
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.register_post_accumulate_grad_hook(self._stepper(group))
        trained.gradient_norm = self.gradient_norm

    def _stepper(self, group: dict[str, Any]) -> Any:
        def step(p: Any) -> None:
            mine = self.trained.engine.part(p.grad).tensor
            self._follow(mine.untyped_storage())
            self.norms.append(mine.norm())
            del mine
            whole = self.optimizer.param_groups
            self.optimizer.param_groups = [{**group, "params": [p]}]
            try:
                self.optimizer.step()
            finally:
                self.optimizer.param_groups = whole
            p.grad = None
            self.updates += 1

        return step

    def _follow(self, storage: Any) -> None:
        self.watched = [w for w in self.watched if w() is not None]
        if any(w() is storage for w in self.watched):
            return
        size = storage.nbytes()

        def freed(_: Any) -> None:
            self.live_bytes -= size

        self.live_bytes += size
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        self.watched.append(weakref.ref(storage, freed))

    def gradient_norm(self) -> Any:
        """Return the global gradient norm of the last backward, from the norm of each before it was
        freed."""
        import torch

        own = torch.linalg.vector_norm(torch.stack(self.norms))
        if "shards" not in self.trained.launch.traits:
            return own
        squares = own.float().square()
        return self.trained.accelerator.reduce(squares, reduction="sum").sqrt()

    def after_step(self) -> None:
        """Clear the norms of this step."""
        self.norms = []


@dataclass(frozen=True, kw_only=True)
class OptimizerInBackward(Strategy):
    """Steps each parameter in backward, frees its gradient.

    A parameter is stepped as soon as its gradient is there. Under FSDP2 a block's gradients arrive
    together, and are freed when its last parameter is stepped. The weights of ``block_swap`` are
    stepped on the device, before their block leaves it.
    """

    name: ClassVar[str] = "optimizer_in_backward"
    slot: ClassVar[Slot] = Slot.STEP
    source: ClassVar[str] = (
        "Lv et al. 2023, LOMO (arXiv:2306.09782); PyTorch tutorial, optimizer step in backward"
    )

    def traits(self) -> frozenset[str]:
        return frozenset({"frees_gradients", "early_gradients"})

    def attach(self, trained: TrainingRun) -> InBackward:
        return InBackward(trained)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        stepper: Any = trained.attached.get(self.name)
        demand(isinstance(stepper, InBackward), "the optimizer does not step in backward")
        found = trained.engine.report(trained).gradient_bucket_bytes
        sizes = sorted([w.nbytes for w in trained.optimized()] if found is None else found)
        updates = len(trained.optimized()) * (trained.optimizer_steps - trained.resumed_steps)
        demand(
            stepper.updates == updates,
            f"{stepper.updates} parameters were stepped in backward, expected {updates}",
        )
        left = [p for p in trained.optimized() if p.grad is not None]
        demand(not left, f"{len(left)} gradients were alive after backward, expected none")
        # The current one, and the one before it, which autograd releases a moment later; torch's
        # FSDP2 has released a block's before it reduces the next.
        bound = sum(sizes[-1 if "dtensor_weights" in trained.launch.traits else -2 :])
        demand(
            stepper.most_bytes <= bound,
            f"{stepper.most_bytes} bytes of gradients were alive at once, expected at most {bound}",
        )
        return {"most_gradient_bytes": stepper.most_bytes, "all_gradient_bytes": sum(sizes)}

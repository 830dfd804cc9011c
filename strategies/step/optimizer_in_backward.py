"""optimizer_in_backward: the optimizer steps each parameter in backward and frees its gradient."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Attachment, Slot, demand
from strategies.engine import TrainingRun
from strategies.strategy import Strategy


class InBackward(Attachment):
    """Attachment that steps each parameter when its gradient arrives, and frees the gradient.

    It is one optimizer, with one group narrowed to that parameter: state, settings and checkpoints
    remain the whole optimizer's. ``most_bytes`` is the most that gradients' storages held at once.
    Each counts until it is really freed, so a remaining reference shows. If gradients of a block
    share one tensor, it counts once.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.run, self.optimizer = run, run.inner_optimizer
        self.live: weakref.WeakSet[Any] = weakref.WeakSet()
        self.norms: list[Any] = []
        self.updates = self.most_bytes = 0
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.register_post_accumulate_grad_hook(functools.partial(self._step, group))
        run.gradient_norm = self.gradient_norm

    def _step(self, group: dict[str, Any], p: Any) -> None:
        mine = self.run.engine.part(p.grad).tensor
        self.live.add(mine.untyped_storage())
        self.most_bytes = max(self.most_bytes, sum(s.nbytes() for s in self.live))
        self.norms.append(mine.norm())
        del mine
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [{**group, "params": [p]}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        p.grad = None
        self.updates += 1

    def gradient_norm(self) -> Any:
        """Return the global gradient norm of the last backward, from the norm of each before it was
        freed."""
        import torch

        own = torch.linalg.vector_norm(torch.stack(self.norms))
        if "shards" not in self.run.launch.traits:
            return own
        squares = own.float().square()
        return self.run.accelerator.reduce(squares, reduction="sum").sqrt()

    def after_step(self) -> None:
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

    def attach(self, run: TrainingRun) -> InBackward:
        return InBackward(run)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        stepper: Any = run.attached.get(self.name)
        demand(isinstance(stepper, InBackward), "the optimizer does not step in backward")
        optimized = run.optimized()
        wanted = len(optimized) * (run.optimizer_steps - run.resumed_steps)
        text = f"{stepper.updates} parameters were stepped in backward, expected {wanted}"
        demand(stepper.updates == wanted, text)
        found = run.engine.report(run).gradient_bucket_bytes
        sizes = sorted([w.nbytes for w in optimized] if found is None else found)
        # The current one, and the one before it, which autograd releases a moment later; torch's
        # FSDP2 has released a block's before it reduces the next.
        most = sum(sizes[-1 if "dtensor_weights" in run.launch.traits else -2 :])
        text = f"{stepper.most_bytes} bytes of gradients were alive at once"
        demand(stepper.most_bytes <= most, f"{text}, expected at most {most}")
        return {"most_gradient_bytes": stepper.most_bytes, "all_gradient_bytes": sum(sizes)}

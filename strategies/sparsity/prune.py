"""Pruning by magnitude: the smallest weights are zero, and stay zero while the others train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Slot, Watcher, demand
from strategies.engine import Launch, Trained
from strategies.strategy import Strategy
from strategies.subject import Subject

__all__ = ["Masks", "Prune"]


def matrices(module: Any, subject: Subject) -> list[Any]:
    """The matrices of the blocks."""
    blocks = subject.blocks(module)
    return [p for block in blocks for p in block.parameters() if p.ndim == 2]


class Masks(Watcher):
    """One bool an element of each pruned matrix; a pruned weight's gradient is zero.

    Adam moves no weight whose gradients were all zero, so a float32 master that an engine keeps out
    of reach stays zero with the weight. An optimizer that mixes elements would move it; where the
    weights are at hand they are masked once more after each step.
    """

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.pruned: list[tuple[Any, Any]] = []
        for p in trained.module.parameters():
            if hasattr(p, "pruned_to"):
                mask = p.pruned_to.to(trained.accelerator.device)
                del p.pruned_to
                self.pruned.append((p, mask))
                p.register_hook(lambda gradient, mask=mask: gradient * mask)

    def after_step(self) -> None:
        """Mask the weights themselves where they are the optimizer's own."""
        import torch

        if "flat_weights" in self.trained.launch.traits:
            return
        with torch.no_grad():
            for p, mask in self.pruned:
                p.mul_(mask)

    def tensors(self) -> list[Any]:
        """The masks: pruned weights take a byte more, not four less."""
        return [mask for _, mask in self.pruned]

    def state_dict(self) -> dict[str, Any]:
        """The masks, which were made from the first weights."""
        return {"masks": self.tensors()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the masks in place, for the hooks hold them."""
        for mine, saved in zip(self.tensors(), state["masks"], strict=True):
            mine.copy_(saved)

    def counted(self) -> tuple[int, int, int]:
        """Pruned places, elements, and pruned places whose weight is not zero; all ranks call."""
        pruned = total = wrong = 0
        whole = self.trained.engine.whole(self.trained, [p for p, _ in self.pruned])
        for p, (_, mask) in zip(whole, self.pruned, strict=True):
            wrong += int((p.detach()[~mask] != 0).sum())
            pruned, total = pruned + int((~mask).sum()), total + mask.numel()
        return pruned, total, wrong


@dataclass(frozen=True, kw_only=True)
class Prune(Strategy):
    """Zeroes the smallest ``fraction`` of each matrix of the blocks, and keeps those at zero.

    Weights, gradients and moments stay dense: it saves no memory, and costs the masks.
    """

    name: ClassVar[str] = "prune"
    slot: ClassVar[Slot] = Slot.SPARSIFY
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("forward",)
    source: ClassVar[str] = "Han et al. 2015, Weights and Connections (arXiv:1506.02626)"
    reads_weights: ClassVar[bool] = True

    fraction: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise ValueError(f"fraction is {self.fraction!r}; between 0 and 1")

    def traits(self) -> frozenset[str]:
        return frozenset({"masked_weights"})

    def refuses(self, launch: Launch) -> str | None:
        if "frozen_weights" in launch.traits:
            return "prunes what is trained, and most is frozen here; leave prune out"
        if "dtensor_weights" in launch.traits:
            return "masks are of whole matrices, gradients come in rows of them; use zero2 or ddp"
        if "cut_weights" in launch.traits:
            return "masks are of whole matrices, and ranks have parts of them; leave tp out"
        if launch.traits >= {"flat_weights", "rounds_state"}:
            return "rounded moments move pruned weights, out of reach in ZeRO's master; use adamw"
        return None

    def edit_model(self, module: Any, subject: Subject) -> None:
        import torch

        with torch.no_grad():
            for p in matrices(module, subject):
                lowest = int(self.fraction * p.numel())
                order = p.abs().flatten().argsort()
                mask = torch.ones(p.numel(), dtype=torch.bool)
                mask[order[:lowest]] = False
                p.pruned_to = mask.view_as(p)
                p.mul_(p.pruned_to)

    def attach(self, trained: Trained) -> Masks:
        return Masks(trained)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        masks = trained.attached.get(self.name)
        demand(isinstance(masks, Masks) and bool(masks.pruned), "no masks are kept")
        pruned, total, wrong = masks.counted()
        share = pruned / total
        demand(abs(share - self.fraction) < 0.01, f"{share:.3f} of the weights are masked")
        demand(wrong == 0, f"{wrong} of {pruned} pruned weights are not zero")
        size = sum(m.numel() for m in masks.tensors())
        return {"pruned": pruned, "of": total, "mask_bytes": size, "bytes_saved": 0}

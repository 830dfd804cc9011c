"""Activation checkpointing: keep few activations, compute the rest again in backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.activations.parts import Recompute, keep_products
from strategies.activations.recomputed import recomputed
from strategies.activations.runners import surround
from strategies.activations.splits import Split, halves, prefixes, segments
from strategies.base import Slot
from strategies.engine import Launch, Trained
from strategies.strategy import Strategy
from strategies.subject import Subject

__all__ = ["Checkpoint"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Strategy):
    """Keeps the input of every k-th block and recomputes the k blocks behind it in backward.

    ``every=1`` keeps each block's input; ``every=sqrt`` takes k near the root of the depth: the
    memory of O(sqrt L) activations for one more forward. ``keep`` goes further than ``segments``:
    ``nested`` keeps O(log L) inputs for O(L log L) work, ``nothing`` the first input alone for
    O(L^2) work, ``products`` also the outputs of matrix products and attention, so that only
    cheap operations are repeated. ``share`` recomputes that share of the blocks alone, the first
    ones (at least one): as much of the extra forward as the memory that is short. ``reentrant`` is
    torch's older way, and what it takes where nobody says: forward records no graph, and backward
    enters itself for each part.
    """

    name: ClassVar[str] = "checkpoint"
    slot: ClassVar[Slot] = Slot.RECOMPUTE
    source: ClassVar[str] = (
        "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv:1604.06174); "
        "torch.utils.checkpoint, selective checkpointing"
    )

    every: int | str = 1
    keep: str = "segments"
    share: float = 1.0
    reentrant: bool = False

    def __post_init__(self) -> None:
        if self.every != "sqrt" and not (isinstance(self.every, int) and self.every >= 1):
            raise ValueError(f"every is {self.every!r}; a number of blocks from 1, or sqrt")
        if self.keep not in ("segments", "nested", "nothing", "products"):
            raise ValueError(f"keep is {self.keep!r}; one of segments, nested, nothing, products")
        if self.keep in ("nested", "nothing") and self.every != 1:
            raise ValueError(f"keep={self.keep} splits by itself; leave every={self.every} out")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share:g}; above 0, to 1 (all blocks)")
        if self.share < 1 and (self.keep in ("nested", "nothing") or self.every == "sqrt"):
            how = "every=sqrt" if self.every == "sqrt" else f"keep={self.keep}"
            raise ValueError(f"{how} is of all blocks; leave share={self.share:g} out")
        if self.reentrant and self.keep != "segments":
            raise ValueError(f"reentrant keeps inputs alone; leave keep={self.keep} out")

    def traits(self) -> frozenset[str]:
        return frozenset({"recomputes"})

    def refuses(self, launch: Launch) -> str | None:
        grouped = f"every={self.every}" if self.every != 1 else f"keep={self.keep}"
        if self.every != 1 or self.keep in ("nested", "nothing"):
            lack = launch.subject.lacks("chain", f"leave {grouped} out")
            if lack:
                return lack
        if self.share < 1 and "moves_activations" in launch.traits:
            return (
                f"share={self.share:g} keeps the other blocks whole, and all that is kept would "
                "be moved; leave it out, or leave offload_activations out"
            )
        if self.every != "sqrt" and self.every > 1:
            depth = launch.subject.dimensions.depth
            if self.every > depth:
                return f"every={self.every}, and the model has {depth} blocks; give at most {depth}"
        if self.keep == "products" and "cut_weights" in launch.traits:
            return "a product would be kept before ranks have summed it; leave keep=products out"
        if self.reentrant and "frozen_weights" in launch.traits:
            return (
                "nothing that enters the first block needs a gradient, so that reentrant blocks "
                "would get none; leave reentrant=on out"
            )
        if self.reentrant and "compiled" in launch.traits:
            return "a compiled block records a graph, and reentrant none; leave reentrant=on out"
        if self.keep != "segments" and "compiled" in launch.traits:
            return (
                f"keep={self.keep} chooses what a compiler would; leave it out, or take "
                "compile:budget=0.5 without checkpoint"
            )
        return None

    def by_block(self, depth: int) -> list[tuple[int, int]]:
        """The size of each block's part, and its place there; (0, 0) where it is not recomputed."""
        count = self._count(depth) or depth
        sizes, _ = self._split(depth)(count, 0)
        parts = [(size, place) for size in sizes for place in range(size)]
        return [*parts, *[(0, 0)] * (depth - count)]

    def edit_model(self, module: Any, subject: Subject) -> None:
        policy = keep_products if self.keep == "products" else None
        blocks = subject.blocks(module)
        split, count = self._split(len(blocks)), self._count(len(blocks))
        chosen = None if count is None else blocks[:count]
        more = {"random": subject.random_blocks, "chosen": chosen, "reentrant": self.reentrant}
        surround(module, subject, lambda inner: Recompute(inner, split, policy, **more))

    def _count(self, depth: int) -> int | None:
        """How many blocks are recomputed, where it is not all."""
        return None if self.share == 1 else max(1, round(self.share * depth))

    def _split(self, depth: int) -> Split:
        nested = {"nested": halves, "nothing": prefixes}
        length = round(math.sqrt(depth)) if self.every == "sqrt" else int(self.every)
        return nested.get(self.keep) or segments(length)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        depth = len(trained.blocks())
        return recomputed(
            trained,
            self._split(depth),
            self._count(depth),
            products=self.keep == "products",
            reentrant=self.reentrant,
        )

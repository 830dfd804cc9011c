"""Activation checkpointing: keep few activations, compute the rest again in backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.activations.parts import (
    Recompute,
    Split,
    block_runs,
    halves,
    keep_products,
    prefixes,
    segments,
)
from strategies.activations.runners import runner_of, surround
from strategies.base import Slot, demand
from strategies.engine import Launch, Trained
from strategies.strategy import Strategy
from strategies.subject import Subject

__all__ = ["Checkpoint"]


RNG_BYTES = 5056
"""The CPU generator's state, which compiled checkpoints keep for each attention: it might draw."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Strategy):
    """Keeps the input of every k-th block and recomputes the k blocks behind it in backward.

    ``every=1`` keeps each block's input; ``every=sqrt`` takes k near the root of the depth: the
    memory of O(sqrt L) activations for one more forward. ``keep`` goes further than ``segments``:
    ``nested`` keeps O(log L) inputs for O(L log L) work, ``nothing`` the first input alone for
    O(L^2) work, ``products`` also the outputs of matrix products and attention, so that only
    cheap operations are repeated. ``share`` recomputes that share of the blocks alone, the first
    ones (at least one): as much of the extra forward as the memory that is short.
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
        if self.keep != "segments" and "compiled" in launch.traits:
            return (
                f"keep={self.keep} chooses what a compiler would; leave it out, or take "
                "compile:budget=0.5 without checkpoint"
            )
        return None

    def edit_model(self, module: Any, subject: Subject) -> None:
        policy = keep_products if self.keep == "products" else None
        blocks = subject.blocks(module)
        split, random = self._split(len(blocks)), subject.random_blocks
        chosen = None if self.share == 1 else blocks[: self._count(len(blocks))]
        surround(
            module,
            subject,
            lambda inner: Recompute(inner, split, policy, random=random, chosen=chosen),
        )

    def _count(self, depth: int) -> int:
        """How many blocks are recomputed."""
        return max(1, round(self.share * depth))

    def _split(self, depth: int) -> Split:
        nested = {"nested": halves, "nothing": prefixes}
        length = round(math.sqrt(depth)) if self.every == "sqrt" else int(self.every)
        return nested.get(self.keep) or segments(length)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        runner, depth = runner_of(trained.module, Recompute), len(trained.blocks())
        demand(runner is not None, "the blocks are not run by parts")
        demand(runner.blocks == depth, f"{runner.blocks} of {depth} blocks are run by parts")
        split = self._split(depth)
        counts = [runner.recomputed(call.block, call.count) for call in runner.calls]
        demand(
            self.share == 1 or sum(counts) == self._count(depth),
            f"{sum(counts)} of {depth} blocks are recomputed, not {self._count(depth)}",
        )
        parts_of_call = [len(split(count, 0)[0]) if count else 0 for count in counts]
        parts, ran = sum(parts_of_call), runner.parts_run / trained.micro_steps
        demand(ran == parts, f"{ran} parts a micro step, not {parts}")
        wider = 1 + ("doubles_tokens" in trained.launch.traits)
        inputs = sum(
            n * call.input_bytes for n, call in zip(parts_of_call, runner.calls, strict=True)
        )
        most = inputs * wider + RNG_BYTES * depth
        demand(
            0 < runner.kept_bytes <= most,
            f"{runner.kept_bytes} bytes are kept for backward; {parts} parts' inputs are {most}",
        )
        facts = {"parts": parts, "kept_bytes": runner.kept_bytes}
        if "compiled" in trained.launch.traits:
            return facts  # blocks are not counted inside a graph: what is kept shows the effect
        forwards = runner.blocks_run / trained.micro_steps
        kept_whole = sum(call.count for call in runner.calls) - sum(counts)
        wanted = kept_whole + sum(block_runs(split, count) for count in counts if count)
        demand(
            forwards == wanted,
            f"{forwards:.2f} blocks ran forward a micro step; recomputing takes {wanted}",
        )
        if self.keep == "products":
            kept, of_all = runner.products["kept"], trained.subject.survey.products
            least = of_all * sum(counts) // depth
            demand(kept >= least, f"{kept} products are kept, of {least} and those of attention")
            facts["kept_products"] = runner.products["kept"]
            if runner.products["bytes"]:
                facts["kept_product_bytes"] = runner.products["bytes"]
        if self.share < 1:
            facts["blocks_recomputed"] = sum(counts)
        return {**facts, "block_forwards": forwards / depth}

"""Activation checkpointing: keep few activations, compute the rest again in backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Slot, Strategy, Trained, demand

__all__ = ["Checkpoint"]


class Segments:
    """Runs blocks in segments, each recomputed in backward; counts what really ran."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.segments_run = 0
        self.blocks_run = 0

    def __call__(self, blocks: Any, x_BTD: Any, c_BD: Any) -> Any:
        import torch
        from torch.utils.checkpoint import checkpoint

        if not torch.is_grad_enabled():
            return run_blocks(blocks, x_BTD, c_BD)
        for first in range(0, len(blocks), self.length):
            self.segments_run += 1
            segment = blocks[first : first + self.length]
            # Blocks draw no random numbers: the generator's state need not travel along.
            x_BTD = checkpoint(
                self._run, segment, x_BTD, c_BD, use_reentrant=False, preserve_rng_state=False
            )
        return x_BTD

    def _run(self, blocks: Any, x_BTD: Any, c_BD: Any) -> Any:
        self.blocks_run += len(blocks)
        return run_blocks(blocks, x_BTD, c_BD)


def run_blocks(blocks: Any, x_BTD: Any, c_BD: Any) -> Any:
    """The blocks in order, as the bare model runs them."""
    for block in blocks:
        x_BTD = block(x_BTD, c_BD)
    return x_BTD


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Strategy):
    """Keeps the input of every k-th block and recomputes the k blocks behind it in backward.

    ``every=1`` keeps each block's input; ``every=sqrt`` takes k near the root of the depth: the
    memory of O(sqrt L) activations for one more forward.
    """

    name: ClassVar[str] = "checkpoint"
    slot: ClassVar[Slot] = Slot.RECOMPUTE
    source: ClassVar[str] = (
        "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv:1604.06174)"
    )

    every: int | str = 1

    def __post_init__(self) -> None:
        if self.every != "sqrt" and not (isinstance(self.every, int) and self.every >= 1):
            raise ValueError(f"every is {self.every!r}; a number of blocks from 1, or sqrt")

    def edit_model(self, module: Any) -> None:
        module.run_blocks = Segments(self._length(len(module.blocks)))

    def _length(self, depth: int) -> int:
        return round(math.sqrt(depth)) if self.every == "sqrt" else int(self.every)

    def evidence(self, trained: Trained) -> dict[str, Any]:
        runner, depth = trained.module.run_blocks, len(trained.module.blocks)
        demand(isinstance(runner, Segments), "the blocks are not run in segments")
        asked = self._length(depth)
        demand(runner.length == asked, f"segments of {runner.length} blocks, not {asked}")
        segments = runner.segments_run / trained.micro_steps
        forwards = runner.blocks_run / trained.micro_steps / depth
        demand(segments == math.ceil(depth / runner.length), f"{segments} segments a micro step")
        demand(
            forwards >= 2.0,
            f"each block ran forward {forwards:.2f} times a micro step; recomputing takes 2",
        )
        return {"segment_blocks": runner.length, "segments": segments, "block_forwards": forwards}

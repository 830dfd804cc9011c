"""Block runner that recomputes segments of blocks in backward, and counts the blocks that ran."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from strategies.activations.runners import MeasuredBlocks

# ---- segmentation ----


Split = Callable[[int, int], tuple[list[int], int]]
"""(blocks, level) -> (size of each checkpointed part, number of blocks left to run directly)."""


def segments(length: int) -> Split:
    """Return a split into parts of ``length`` blocks: O(L / length) inputs kept."""

    def split(blocks: int, level: int) -> tuple[list[int], int]:
        if level:
            return [], blocks
        return [min(length, blocks - first) for first in range(0, blocks, length)], 0

    return split


def prefixes(blocks: int, level: int) -> tuple[list[int], int]:
    """Split off the last block at each level: only the input kept, O(L^2) blocks run."""
    if not level:
        return [blocks], 0
    return ([blocks - 1] if blocks > 1 else []), 1


class Recompute(MeasuredBlocks):
    """Block runner that recomputes parts of the blocks in backward, and counts the runs.

    ``chosen``: the recomputed blocks, if not all are. ``products``: the outputs that ``policy``
    made torch keep in the first forward.
    """

    def __init__(
        self,
        inner: Any,
        split: Split,
        policy: Any = None,
        *,
        random: bool = False,
        chosen: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(inner)
        self.split, self.blocks_run, self.parts_run, self.products = split, 0, 0, 0
        self.chosen = None if chosen is None else frozenset(map(id, chosen))
        # Blocks without random numbers need no generator state.
        self.options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
        if policy:
            self.options["context_fn"] = functools.partial(policy, self)

    def recomputes(self, block: Any) -> bool:
        """Return whether ``block`` is recomputed."""
        return self.chosen is None or id(block) in self.chosen

    def run(self, blocks: Any, *given: Any, **named: Any) -> Any:
        first = 0
        for again, alike in itertools.groupby(blocks, self.recomputes):
            some = blocks[first : first + len([*alike])]
            first += len(some)
            if again:
                sizes = self.split(len(some), 0)[0]
                self.parts_run += len(sizes)
                out = self._parts(some, sizes, 1, given, named)
            else:
                self.passing = True
                out = self._counted(some, given, named)
                self.passing = False
            given = (out, *given[1:])
        return given[0]

    def _counted(self, blocks: Any, given: Any, named: Any) -> Any:
        import torch

        if not torch.compiler.is_compiling():
            self.blocks_run += len(blocks)
        return self.inner(blocks, *given, **named)

    def _parts(self, blocks: Any, sizes: list[int], level: int, given: Any, named: Any) -> Any:
        """Run parts of these sizes, each under a checkpoint, from one output to the next."""
        for size in sizes:
            given = (self.part(blocks[:size], level, *given, **named), *given[1:])
            blocks = blocks[size:]
        return given[0]

    def part(self, blocks: Any, level: int, *given: Any, **named: Any) -> Any:
        """Run some blocks under one checkpoint; autograd's hooks see only positional inputs."""
        from torch.utils.checkpoint import checkpoint

        count, names = len(given), tuple(named)

        def by_place(blocks: Any, level: int, *values: Any) -> Any:
            named = dict(zip(names, values[count:], strict=True))
            return self._inside(blocks, level, *values[:count], **named)

        run = by_place if names else self._inside
        return checkpoint(run, blocks, level, *given, *named.values(), **self.options)

    def _inside(self, blocks: Any, level: int, *given: Any, **named: Any) -> Any:
        sizes, left = self.split(len(blocks), level)
        if sizes:
            given = (self._parts(blocks, sizes, level + 1, given, named), *given[1:])
            blocks = blocks[sum(sizes) :]
        return self._counted(blocks, given, named) if left else given[0]

    def compile_within(self, compiler: Callable[[Any], Any], blocks: Sequence[Any]) -> None:
        """Compile the forward of each recomputed block with its checkpoint inside.

        This is for engines that gather a block's weights in hooks around it, where a graph breaks.
        Parts must be single blocks. Source: torchtitan, its order of checkpoint, compile and FSDP2.
        """
        options = self.options

        def again(block: Any, *given: Any, **named: Any) -> Any:
            from torch.utils.checkpoint import checkpoint

            return checkpoint(type(block).forward, block, *given, **named, **options)

        compiled = compiler(again)
        for block in filter(self.recomputes, blocks):
            block.forward = functools.partial(compiled, block)
        self.part = self._inside  # type: ignore[method-assign]


def keep_products(runner: Recompute) -> Any:
    """Return torch's selective checkpointing contexts, which keep matrix products and attention."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    products = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        packet = getattr(operation, "overloadpacket", operation)
        if packet not in products and "scaled_dot_product" not in str(packet):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if runner.weighing and not torch.compiler.is_compiling():
            runner.products += 1
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)

"""Block runner that recomputes segments of blocks in backward, and counts the blocks that ran."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from strategies.activations.runners import MeasuredBlocks

NESTED = 0
"""Length of parts that lie in each other: one of all blocks, within it one of all but the last, and
so on. Only one input is kept, and O(L^2) blocks run."""


def part_sizes(blocks: int, length: int) -> list[int]:
    """Return the sizes of the parts of ``length`` blocks that so many blocks have."""
    step = length or blocks
    return [min(step, blocks - first) for first in range(0, blocks, step)]


class Recompute(MeasuredBlocks):
    """Block runner that recomputes parts of the blocks in backward, and counts the runs.

    ``length``: blocks of a part, or ``NESTED``. ``chosen``: the recomputed blocks, if not all are.
    ``products``: the outputs that ``policy`` made torch keep in the first forward.
    """

    def __init__(
        self,
        inner: Any,
        length: int,
        policy: Any = None,
        *,
        random: bool = False,
        chosen: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(inner)
        self.length, self.blocks_run, self.parts_run, self.products = length, 0, 0, 0
        self.chosen = None if chosen is None else frozenset(map(id, chosen))
        # Blocks without random numbers need no generator state.
        self.options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
        if policy:
            self.options["context_fn"] = functools.partial(policy, self)

    def recomputes(self, block: Any) -> bool:
        """Return whether ``block`` is recomputed."""
        return self.chosen is None or id(block) in self.chosen

    def run(self, blocks: Any, *given: Any, **named: Any) -> Any:
        for again, alike in itertools.groupby(blocks, self.recomputes):
            count = len([*alike])
            sizes = part_sizes(count, self.length) if again else [count]
            self.parts_run += len(sizes) * again
            self.passing = not again
            for size in sizes:
                one = self.part if again else self._counted
                given = (one(blocks[:size], *given, **named), *given[1:])
                blocks = blocks[size:]
            self.passing = False
        return given[0]

    def _counted(self, blocks: Any, *given: Any, **named: Any) -> Any:
        import torch

        if not torch.compiler.is_compiling():
            self.blocks_run += len(blocks)
        return self.inner(blocks, *given, **named)

    def part(self, blocks: Any, *given: Any, **named: Any) -> Any:
        """Run some blocks under one checkpoint; autograd's hooks see only positional inputs."""
        from torch.utils.checkpoint import checkpoint

        count, names = len(given), tuple(named)

        def by_place(blocks: Any, *values: Any) -> Any:
            named = dict(zip(names, values[count:], strict=True))
            return self._inside(blocks, *values[:count], **named)

        run = by_place if names else self._inside
        return checkpoint(run, blocks, *given, *named.values(), **self.options)

    def _inside(self, blocks: Any, *given: Any, **named: Any) -> Any:
        if self.length == NESTED and len(blocks) > 1:
            given = (self.part(blocks[:-1], *given, **named), *given[1:])
            blocks = blocks[-1:]
        return self._counted(blocks, *given, **named)

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

"""How a model's blocks are split into parts, and how often a block is run in each of the ways."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Split", "block_runs", "halves", "prefixes", "segments"]

Split = Callable[[int, int], tuple[list[int], int]]
"""(blocks, level) -> (how many go into each checkpointed part, how many are left to run as is)."""


def segments(length: int) -> Split:
    """Parts of ``length`` blocks, each run as it is: O(L / length) inputs kept."""

    def split(blocks: int, level: int) -> tuple[list[int], int]:
        if level:
            return [], blocks
        return [min(length, blocks - first) for first in range(0, blocks, length)], 0

    return split


def halves(blocks: int, level: int) -> tuple[list[int], int]:
    """Halves of halves down to one block: O(log L) inputs kept, O(L log L) blocks run."""
    if blocks == 1:
        return ([], 1) if level else ([1], 0)
    return [blocks // 2, blocks - blocks // 2], 0


def prefixes(blocks: int, level: int) -> tuple[list[int], int]:
    """All, within it all but the last, and so on: the input alone kept, O(L^2) blocks run."""
    if not level:
        return [blocks], 0
    return ([blocks - 1] if blocks > 1 else []), 1


def block_runs(split: Split, blocks: int) -> int:
    """Blocks that one forward and backward begin to run.

    torch ends a recomputation once it has what backward asks for. A part that consists of parts
    is asked for their inputs alone, so its last one is not run again with it, but on its own.
    """

    def again(count: int, level: int) -> int:
        parts, left = split(count, level)
        rerun = sum(parts) + left if left else sum(parts[:-1])
        return rerun + sum(again(part, level + 1) for part in parts)

    return blocks + sum(again(part, 1) for part in split(blocks, 0)[0])

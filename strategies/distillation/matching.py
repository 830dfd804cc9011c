"""Which block of a deep model a block of a shallow one answers to. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["chosen", "ends", "renamed"]


def chosen(depth: int, of: int) -> list[int]:
    """``depth`` of ``of`` blocks, evenly, the first and the last among them: what a student begins
    with. More blocks than there are: some are taken twice."""
    return [round(i * (of - 1) / max(1, depth - 1)) for i in range(depth)]


def ends(depth: int, of: int) -> list[int]:
    """The block behind which a model of ``of`` blocks is as far as one of ``depth`` is behind each
    of its own: the last answers to the last."""
    return [max(0, round((i + 1) * of / depth) - 1) for i in range(depth)]


def renamed(name: str, prefixes: Sequence[str], blocks: Sequence[int]) -> str:
    """The name, in a model of the ``blocks`` that were chosen, of the parameter ``name``, which is
    in a block if it begins with one of the ``prefixes`` ("blocks") and a number."""
    for prefix in prefixes:
        found = re.match(rf"{re.escape(prefix)}\.(\d+)\.(.*)", name, re.DOTALL)
        if found:
            return f"{prefix}.{blocks[int(found[1])]}.{found[2]}"
    return name

"""Blocks that a text selects. It imports nothing of this project: an export carries it."""

from __future__ import annotations

import re

WORD = re.compile(r"(?P<end>first|last)?(?P<low>\d+)(?:-(?P<high>\d+))?")


def block_ranges(text: str) -> list[tuple[str, int, int]]:
    """Return the ranges of ``text``, such as ``0-3/8/last2``: (``first``, ``last`` or "", low,
    high).

    Both ends of a range belong to it. ``first2`` has low 2 and high 2.

    Raises:
        ValueError: a word of the text is no range; names it.
    """
    found = []
    for word in text.split("/"):
        match = WORD.fullmatch(word)
        low = int(match["low"]) if match else 0
        high = int(match["high"]) if match and match["high"] else low
        if not match or high < low or (match["end"] and (match["high"] or not low)):
            raise ValueError(
                f"blocks is {text!r}, and {word!r} is no range of blocks; give all, numbers and "
                "ranges from 0 joined by /, as 0-9/12, or first4, last4"
            )
        found.append((match["end"] or "", low, high))
    return found


def chosen_blocks(text: str, depth: int) -> list[int]:
    """Return the indices that ``text`` selects of ``depth`` blocks; those beyond are left out."""
    if text == "all":
        return list(range(depth))
    chosen: set[int] = set()
    for end, low, high in block_ranges(text):
        spans = {"first": range(low), "last": range(max(0, depth - low), depth)}
        chosen.update(spans.get(end, range(low, high + 1)))
    return sorted(index for index in chosen if index < depth)


def most_blocks(text: str) -> int:
    """Return the number of blocks that a model needs for ``text``; 0 for ``all``."""
    if text == "all":
        return 0
    return max(high if end else high + 1 for end, _, high in block_ranges(text))

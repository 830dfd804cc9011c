"""What ``plan --largest`` can seek: batch, model, resolution, frames, rank, resident. No torch.

Each is a ladder of sizes along which one number of a spec or a recipe grows and all else stays;
``search`` climbs it. A size that is named was predicted by itself.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.predict.edits import edited
from harness.predict.search import (
    MOST,
    Ladder,
    Largest,
    batch_name,
    largest_batch,
    largest_model,
    model_name,
    search,
)
from harness.predict.speed.cards import Card
from harness.resolve import Resolved, resolve
from strategies.base import BadInput, Slot
from strategies.strategy import Strategy
from strategies.streaming.block_swap import AT_ONCE

__all__ = ["SOUGHT", "Sought", "adapter", "ranked", "refuse", "unable"]


@dataclass(frozen=True, kw_only=True)
class Sought:
    """A size that can be sought: how a head calls it, how a row's is named, and the search."""

    words: str
    named: Callable[[Resolved], str]
    seek: Callable[..., list[Largest]]


def climb(axis: str) -> Callable[..., list[Largest]]:
    """The search along ``axis`` of a sample ("resolution", "frames")."""

    def seek(
        asked: Sequence[Resolved], gpu: Card, folder: Path, jobs: int, progress: Any, tries: int = 0
    ) -> list[Largest]:
        sizes = asked[0].subject.samples_up(axis)
        weights = [times for _, times in sizes]

        def at(resolved: Resolved, index: int) -> Resolved:
            return resolve(dataclasses.replace(resolved.spec, **sizes[index][0]))

        own = bisect_left(weights, 1.0)
        ladder = Ladder(weights=weights, at=at, named=sample_name, start=own)
        return search(asked, ladder, gpu, folder, jobs, progress, tries)

    return seek


def sample_name(resolved: Resolved) -> str:
    """The size of a row's sample: ``480x832 of 81 frames``."""
    return resolved.subject.size_in_words.partition(",")[0]


def largest_rank(
    asked: Sequence[Resolved], gpu: Card, folder: Path, jobs: int, progress: Any, tries: int = 0
) -> list[Largest]:
    """The largest rank of each recipe's adapters."""
    ranks = Ladder(weights=range(1, MOST + 1), at=lambda row, index: ranked(row, index + 1),
                   named=rank_name)  # fmt: skip
    return search(asked, ranks, gpu, folder, jobs, progress, tries)


def most_resident(
    asked: Sequence[Resolved], gpu: Card, folder: Path, jobs: int, progress: Any, tries: int = 0
) -> list[Largest]:
    """Of each recipe as many blocks as fit beside the swapped ones: the fewest to swap."""
    depth = asked[0].subject.depth
    swapped = [*range(depth, AT_ONCE, -1), 0]
    # Two of those that are swapped are on the device at a time.
    weights = [float(depth - count + AT_ONCE if count else depth) for count in swapped]
    blocks = Ladder(weights=weights, at=lambda row, index: swapping(row, swapped[index]),
                    named=resident_name, start=len(swapped) - 1)  # fmt: skip
    return search(asked, blocks, gpu, folder, jobs, progress, tries)


def swapping(resolved: Resolved, count: int) -> Resolved:
    """The row with so many of its blocks swapped; with none, without the part that does it."""
    recipe = edited(resolved, {Slot.SWAP: f"block_swap:blocks={count}" if count else ""})
    return resolve(dataclasses.replace(resolved.spec, recipe=recipe))


def resident_name(resolved: Resolved) -> str:
    """The size of a row of ``most_resident``: ``12 blocks swapped, 45 of 57 stay``."""
    part, depth = resolved.recipe.in_slot(Slot.SWAP), resolved.subject.depth
    count = getattr(part, "blocks", 0)
    return f"{count} blocks swapped, {depth - count} of {depth} stay"


def adapter(resolved: Resolved) -> Strategy | None:
    """The part of a recipe whose adapters have a rank; None where it has none."""
    part = resolved.recipe.in_slot(Slot.ADAPT)
    return part if hasattr(part, "rank") else None


def ranked(resolved: Resolved, rank: int) -> Resolved:
    """The row with adapters of another rank; only where there is an ``adapter``."""
    part = dataclasses.replace(adapter(resolved), rank=rank)
    recipe = edited(resolved, {Slot.ADAPT: str(part)})
    return resolve(dataclasses.replace(resolved.spec, recipe=recipe))


def rank_name(resolved: Resolved) -> str:
    """The size of a row of ``largest_rank``."""
    return f"rank {adapter(resolved).rank}"


def unable(what: str, resolved: Resolved) -> str:
    """Why the largest ``what`` of this row cannot be sought, with the way out; or nothing."""
    recipe, model = resolved.recipe, resolved.spec.model
    if what == "rank" and adapter(resolved) is None:
        return f"{recipe} has no adapters, and so no rank; add lora:rank=16, or seek another size"
    if what == "resident":
        refusal = swapping(resolved, AT_ONCE + 1).refusal
        return f"no block of {recipe} can be swapped: {refusal}" if refusal else ""
    if what in ("resolution", "frames") and not resolved.subject.samples_up(what):
        return f"model {model} takes samples of one number of {what}; seek batch instead"
    return ""


def refuse(what: str, rows: Sequence[Resolved]) -> None:
    """Raise where no row's largest ``what`` can be sought.

    Raises:
        BadInput: why not, and the way out.
    """
    reasons = [unable(what, row) for row in rows]
    if all(reasons):
        raise BadInput(f"largest is {what}: {reasons[0]}")


SOUGHT: dict[str, Sought] = {
    "batch": Sought(words="micro batch", named=batch_name, seek=largest_batch),
    "model": Sought(words="DiT (M: million parameters)", named=model_name, seek=largest_model),
    "resolution": Sought(words="resolution", named=sample_name, seek=climb("resolution")),
    "frames": Sought(words="number of frames", named=sample_name, seek=climb("frames")),
    "rank": Sought(words="rank", named=rank_name, seek=largest_rank),
    "resident": Sought(
        words="number of blocks that stay on the GPU", named=resident_name, seek=most_resident
    ),
}
"""What ``--largest`` takes -> how it is sought."""

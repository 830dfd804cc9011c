"""What ``plan --largest`` can seek: batch, model, resolution, frames, rank, resident. No torch.

Each is a ladder of sizes along which one number of a spec or a recipe grows and all else stays;
``search`` climbs it. A size that is named was predicted by itself.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.predict.edits import edited
from harness.predict.search import (
    MOST,
    Ladder,
    Largest,
    batch_name,
    batches,
    model_name,
    models,
    search,
)
from harness.predict.verdict import Fit
from harness.resolve import Resolved, resolve
from strategies.base import BadInput, Slot
from strategies.strategy import Strategy
from strategies.streaming.block_swap import AT_ONCE

__all__ = ["SOUGHT", "Sought", "adapter", "ranked", "refuse", "sample_name",
           "unable"]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sought:
    """A size that can be sought: its name in a head, the name of a row's, and the ladder of them
    for the rows that are asked for."""

    words: str
    named: Callable[[Resolved], str]
    ladder: Callable[[Sequence[Resolved]], Ladder]

    def seek(self, asked: Sequence[Resolved], *how: Any, told: Sequence[Fit] = ()) -> list[Largest]:
        """The largest that fits, of each row (``harness.predict.search.search``)."""
        return search(asked, self.ladder(asked), *how, told=told)


def samples(axis: str) -> Callable[[Sequence[Resolved]], Ladder]:
    """The ladder along ``axis`` of a sample ("resolution", "frames")."""

    def ladder(asked: Sequence[Resolved]) -> Ladder:
        sizes = asked[0].subject.samples_up(axis)
        weights = [times for _, times in sizes]

        def at(resolved: Resolved, index: int) -> Resolved:
            return resolve(dataclasses.replace(resolved.spec, **sizes[index][0]))

        def place(resolved: Resolved) -> int:
            same = (i for i, (fields, _) in enumerate(sizes)
                    if fields.items() <= vars(resolved.spec).items())  # fmt: skip
            return next(same, -1)

        own = bisect_left(weights, 1.0)
        return Ladder(weights=weights, at=at, named=sample_name, start=own, place=place)

    return ladder


def sample_name(resolved: Resolved) -> str:
    """The size of a row's sample: ``480x832 of 81 frames``."""
    return resolved.subject.size_in_words.partition(",")[0]


def ranks(asked: Sequence[Resolved]) -> Ladder:
    """Ranks of each recipe's adapters; the first recipe's own is tried first."""

    def place(row: Resolved) -> int:
        part = adapter(row)
        return part.rank - 1 if part else -1

    return Ladder(weights=range(1, MOST + 1), at=lambda row, index: ranked(row, index + 1),
                  named=rank_name, place=place,
                  start=next((i for i in map(place, asked) if 0 <= i < MOST), 0))  # fmt: skip


def residents(asked: Sequence[Resolved]) -> Ladder:
    """Numbers of blocks that stay on the device beside the swapped ones."""
    depth = asked[0].subject.depth
    swapped = [*range(depth, AT_ONCE, -1), 0]
    # Two of those that are swapped are on the device at a time.
    weights = [float(depth - count + AT_ONCE if count else depth) for count in swapped]
    return Ladder(weights=weights, at=lambda row, index: swapping(row, swapped[index]),
                  named=resident_name, start=len(swapped) - 1)  # fmt: skip


def swapping(resolved: Resolved, count: int) -> Resolved:
    """The row with so many of its blocks swapped; with none, without the part that does it."""
    recipe = edited(resolved, {Slot.SWAP: f"block_swap:blocks={count}" if count else ""})
    return resolve(dataclasses.replace(resolved.spec, recipe=recipe))


def resident_name(resolved: Resolved) -> str:
    """The size of a row of ``residents``: ``12 blocks swapped, 45 of 57 stay``."""
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
    """The size of a row of ``ranks``."""
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
    "batch": Sought(words="micro batch", named=batch_name, ladder=batches),
    "model": Sought(words="DiT (M: million parameters)", named=model_name, ladder=models),
    "resolution": Sought(words="resolution", named=sample_name, ladder=samples("resolution")),
    "frames": Sought(words="number of frames", named=sample_name, ladder=samples("frames")),
    "rank": Sought(words="rank", named=rank_name, ladder=ranks),
    "resident": Sought(
        words="number of blocks that stay on the GPU", named=resident_name, ladder=residents
    ),
}
"""What ``--largest`` takes -> how it is sought."""

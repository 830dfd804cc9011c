"""Advice for a given recipe: variants that change one knob, and the largest sizes that fit.

A knob is a slot of the recipe (checkpoints, precision, optimizer, sharding) or a size of the spec
(batch, resolution, frames, GPUs). Each variant gets its own prediction; invalid ones are left out.
Does not import torch.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.planner.search import (
    MOST,
    Ladder,
    Largest,
    batch_name,
    batches,
    model_name,
    models,
)
from harness.planner.suggestions import Edit, changed, edited
from harness.planner.verdict import Fit
from harness.resolve import Resolved, resolve
from strategies.base import BadInput, Slot
from strategies.strategy import Strategy
from strategies.streaming.block_swap import AT_ONCE

# ---- Sizes to search ----
# The sizes that ``plan --largest`` accepts. Each has a ladder of sizes along which one number of a
# spec or recipe grows; ``search`` predicts some of them.


@dataclass(frozen=True, kw_only=True)
class Sought:
    """One size that ``plan --largest`` can search for.

    ``words``: its name in a heading. ``named``: returns the size of a row, in words. ``ladder``:
    returns the sizes to choose among, for the requested rows.
    """

    words: str
    named: Callable[[Resolved], str]
    ladder: Callable[[Sequence[Resolved]], Ladder]


def samples(axis: str) -> Callable[[Sequence[Resolved]], Ladder]:
    """Return the function that makes the ladder of "resolution" or "frames" (``axis``)."""

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
    """Return the sample size of a row, such as ``480x832 of 81 frames``."""
    return resolved.subject.size_in_words.partition(",")[0]


def ranks(asked: Sequence[Resolved]) -> Ladder:
    """Return the ladder of adapter ranks; it starts at the first rank of the requested rows."""

    def place(row: Resolved) -> int:
        part = adapter(row)
        return part.rank - 1 if part else -1

    return Ladder(weights=range(1, MOST + 1), at=lambda row, index: ranked(row, index + 1),
                  named=rank_name, place=place,
                  start=next((i for i in map(place, asked) if 0 <= i < MOST), 0))  # fmt: skip


def residents(asked: Sequence[Resolved]) -> Ladder:
    """Return the ladder of block counts that stay on the device while other blocks are swapped."""
    depth = asked[0].subject.depth
    swapped = [*range(depth, AT_ONCE, -1), 0]
    # AT_ONCE of the swapped blocks are on the device at a time.
    weights = [float(depth - count + AT_ONCE if count else depth) for count in swapped]

    def place(row: Resolved) -> int:
        part = row.recipe.in_slot(Slot.SWAP)
        return swapped.index(part.blocks if part else 0)

    return Ladder(weights=weights, at=lambda row, index: swapping(row, swapped[index]),
                  named=resident_name, place=place, start=len(swapped) - 1)  # fmt: skip


def swapping(resolved: Resolved, count: int) -> Resolved:
    """Return the row with ``count`` swapped blocks; with 0, without the block-swap strategy."""
    recipe = edited(resolved, {Slot.SWAP: f"block_swap:blocks={count}" if count else ""})
    return resolve(dataclasses.replace(resolved.spec, recipe=recipe))


def resident_name(resolved: Resolved) -> str:
    """Return the size of a row of ``residents``, such as ``12 blocks swapped, 45 of 57 stay``."""
    part, depth = resolved.recipe.in_slot(Slot.SWAP), resolved.subject.depth
    count = getattr(part, "blocks", 0)
    return f"{count} blocks swapped, {depth - count} of {depth} stay"


def adapter(resolved: Resolved) -> Strategy | None:
    """Return the recipe's strategy whose adapters have a rank, or None."""
    part = resolved.recipe.in_slot(Slot.ADAPT)
    return part if hasattr(part, "rank") else None


def ranked(resolved: Resolved, rank: int) -> Resolved:
    """Return the row with adapters of another rank. The row must have an ``adapter``."""
    part = dataclasses.replace(adapter(resolved), rank=rank)
    recipe = edited(resolved, {Slot.ADAPT: str(part)})
    return resolve(dataclasses.replace(resolved.spec, recipe=recipe))


def rank_name(resolved: Resolved) -> str:
    """Return the size of a row of ``ranks``, such as ``rank 16``."""
    return f"rank {adapter(resolved).rank}"


def unable(what: str, resolved: Resolved) -> str:
    """Return why this row's largest ``what`` cannot be searched, with a hint; empty if it can."""
    recipe, model = resolved.recipe, resolved.spec.model
    if what == "rank" and adapter(resolved) is None:
        return (
            f"{recipe} has no adapters, so it has no rank; add lora:rank=16, or give another "
            "--largest"
        )
    if what == "resident":
        refusal = swapping(resolved, AT_ONCE + 1).refusal
        return f"no block of {recipe} can be swapped: {refusal}" if refusal else ""
    if what in ("resolution", "frames") and not resolved.subject.samples_up(what):
        return f"model {model} takes one number of {what} only; give --largest batch"
    return ""


def refuse(what: str, rows: Sequence[Resolved]) -> None:
    """Refuse a search that no row supports.

    Raises:
        BadInput: the largest ``what`` of no row can be searched; the message has a hint.
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
"""Value of ``--largest`` -> how to search for it."""


SCALES = ("batch", "resolution", "frames", "rank")
"""Knobs with a scale; for these the advice also has the largest size that fits."""
TRIES = 6
"""Most predictions that one of these searches may take."""
USUAL_ADAPTER = "lora:rank=16"
RECOMPUTE = tuple(
    "checkpoint" + more for more in (":share=0.5", "", ":every=sqrt", ":keep=nothing")
)
PRECISION = ("fp32", "bf16", "bf16_pure", "fp8")
OPTIMIZE = ("adamw", "adam8bit", "adafactor")
SHARD = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
OFFLOAD = ("zero2_offload", "zero3_offload")


@dataclass(frozen=True, kw_only=True)
class Move:
    """One changed knob: its name, its new value in words, and the resulting row."""

    knob: str
    to: str
    row: Resolved


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Advice for one recipe: its own fit, each move with its fit, and the largest size by knob."""

    given: Fit
    moved: Sequence[tuple[Move, Fit]]
    largest: Mapping[str, Largest]


Step = tuple[str, Edit, dict[str, Any]]
"""(new value in words, slots of the recipe, fields of the spec). An empty text means the row's
sample size."""


def moves(row: Resolved, processes: int) -> list[Move]:
    """Return all valid moves from ``row`` on ``processes`` GPUs, without duplicates."""
    known, found = {row.spec}, []
    for knob, steps in KNOBS.items():
        for to, edit, fields in steps(row):
            made = changed(row, edit, processes, **fields)
            if made and made.spec not in known:
                known.add(made.spec)
                found.append(Move(knob=knob, to=to or sample_name(made), row=made))
    return found


# ---- Moves of each knob ----


def _places(
    slot: Slot, texts: Sequence[str], none: str = ""
) -> Callable[[Resolved], Iterator[Step]]:
    """Return a function that yields ``texts`` for a slot, and the empty slot, called ``none``."""

    def steps(row: Resolved) -> Iterator[Step]:
        if none and row.recipe.in_slot(slot):
            yield none, {slot: ""}, {}
        for text in texts:
            yield text, {slot: text}, {}

    return steps


def _trained(row: Resolved) -> Iterator[Step]:
    """Yield training of all weights, adapters, and adapters over 4-bit weights."""
    part = adapter(row)
    if row.recipe.in_slot(Slot.ADAPT):
        yield "all weights", {Slot.ADAPT: ""}, {}
    if part is None:
        yield USUAL_ADAPTER, {Slot.ADAPT: USUAL_ADAPTER}, {}
    rank = part.rank if part else 16
    yield f"qlora:rank={rank}", {Slot.ADAPT: f"qlora:rank={rank}"}, {}


def _rank(row: Resolved) -> Iterator[Step]:
    part = adapter(row)
    if part is None:
        return
    for rank in (max(1, part.rank // 4), 4 * part.rank):
        yield f"rank={rank}", {Slot.ADAPT: str(dataclasses.replace(part, rank=rank))}, {}


def _batch(row: Resolved) -> Iterator[Step]:
    """Yield half and twice the micro batch, and twice the accumulation steps."""
    batch, micro = row.spec.global_batch, row.micro_batch
    for size in sorted({max(1, micro // 2), 2 * micro}):
        yield f"micro batch {size}", {}, {"global_batch": batch * size // micro}
    steps = 2 * row.recipe.accumulation
    yield f"accumulate:steps={steps}", {Slot.ACCUMULATE: f"accumulate:steps={steps}"}, {}


def _sample(axis: str, times: Sequence[float]) -> Callable[[Resolved], Iterator[Step]]:
    """Return a function that yields samples with about ``times`` the tokens."""

    def steps(row: Resolved) -> Iterator[Step]:
        sizes = row.subject.samples_up(axis)
        for share in times if sizes else ():
            fields, _ = min(sizes, key=lambda size: abs(size[1] - share))
            yield "", {}, dict(fields)

    return steps


def _offload(row: Resolved) -> Iterator[Step]:
    for name in OFFLOAD:
        yield name, {Slot.SHARD: name}, {}
    what = ":what=checkpoints" if row.recipe.in_slot(Slot.RECOMPUTE) else ""
    if row.recipe.in_slot(Slot.OFFLOAD):
        yield "activations stay", {Slot.OFFLOAD: ""}, {}
    else:
        text = f"offload_activations{what}"
        yield text, {Slot.OFFLOAD: text}, {}


def _swap(row: Resolved) -> Iterator[Step]:
    """Yield block swap of half of the blocks and of all blocks."""
    if row.recipe.in_slot(Slot.SWAP):
        yield "all stay", {Slot.SWAP: ""}, {}
    depth = row.subject.depth
    for count in (depth // 2, depth):
        yield f"block_swap:blocks={count}", {Slot.SWAP: f"block_swap:blocks={count}"}, {}


def _average(row: Resolved) -> Iterator[Step]:
    for place in ("none", "cpu") if row.spec.ema > 0 else ():
        yield f"ema:place={place}", {Slot.AVERAGE: f"ema:place={place}"}, {}


def _shard(row: Resolved) -> Iterator[Step]:
    for name in SHARD if row.spec.processes > 1 else ():
        yield name, {Slot.SHARD: name}, {}


def _gpus(row: Resolved) -> Iterator[Step]:
    """Yield twice the GPUs at the same micro batch, if the row has more than one process."""
    if row.spec.processes > 1:
        twice = 2 * row.spec.processes
        yield f"{twice} GPUs", {}, {"processes": twice, "global_batch": 2 * row.spec.global_batch}


KNOBS: dict[str, Callable[[Resolved], Iterator[Step]]] = {
    "recompute": _places(Slot.RECOMPUTE, RECOMPUTE, "no checkpoints"),
    "precision": _places(Slot.PRECISION, PRECISION),
    "frozen weights": _places(Slot.CAST, ("cast:to=fp8", "cast:to=int8"), "as they are"),
    "optimizer": _places(Slot.OPTIMIZE, OPTIMIZE),
    "step": _places(Slot.STEP, ("optimizer_in_backward",), "after backward"),
    "trained": _trained,
    "rank": _rank,
    "average": _average,
    "batch": _batch,
    "resolution": _sample("resolution", (0.25, 0.5, 2.0)),
    "frames": _sample("frames", (0.5, 2.0)),
    "sharding": _shard,
    "offload": _offload,
    "blocks": _swap,
    "GPUs": _gpus,
}
"""Knob -> function that yields its steps from a row."""

"""Advice from a given recipe: one knob moved at a time, each row predicted by itself. No torch.

A knob is a place of the recipe (checkpoints, precision, optimizer, rank, sharding, offload) or a
size of the spec (batch, resolution, frames, GPUs). A move that cannot be (a part refuses it, a
batch does not divide) is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.predict.edits import Edit, changed
from harness.predict.inverses import adapter, sample_name
from harness.predict.search import Largest
from harness.predict.verdict import Fit
from harness.resolve import Resolved
from strategies.base import Slot

__all__ = ["SCALES", "TRIES", "Advice", "Move", "moves"]

SCALES = ("batch", "resolution", "frames", "rank")
"""Knobs that have a scale: of these the largest that fits is sought too."""
TRIES = 6
"""Predictions that such a search may take."""
USUAL_ADAPTER = "lora:rank=16"
RECOMPUTE = tuple("checkpoint" + more for more in (":share=0.5", "", ":every=sqrt", ":keep=nested"))
PRECISION = ("fp32", "bf16", "bf16_pure", "fp8")
OPTIMIZE = ("adamw", "adam8bit", "adafactor")
SHARD = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
OFFLOAD = ("zero2_offload", "zero3_offload")


@dataclass(frozen=True, kw_only=True)
class Move:
    """One knob moved: which, to what in words, and the row that this makes."""

    knob: str
    to: str
    row: Resolved


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The recipe given, each move with its fit, and the largest sizes that fit, by their knob."""

    given: Fit
    moved: Sequence[tuple[Move, Fit]]
    largest: Mapping[str, Largest]


Step = tuple[str, Edit, dict[str, Any]]
"""(to what, in words, empty: the size of its sample; places of the recipe; fields of the spec)."""


def moves(row: Resolved, processes: int) -> list[Move]:
    """All moves from ``row`` that can be, on ``processes`` GPUs, each recipe and size once."""
    known, found = {row.spec}, []
    for knob, steps in KNOBS.items():
        for to, edit, fields in steps(row):
            made = changed(row, edit, processes, **fields)
            if made and made.spec not in known:
                known.add(made.spec)
                found.append(Move(knob=knob, to=to or sample_name(made), row=made))
    return found


# ---- knobs ----


def _places(
    slot: Slot, texts: Sequence[str], none: str = ""
) -> Callable[[Resolved], Iterator[Step]]:
    """Other parts in one place, and nothing there, where ``none`` says how that is called."""

    def steps(row: Resolved) -> Iterator[Step]:
        if none and row.recipe.in_slot(slot):
            yield none, {slot: ""}, {}
        for text in texts:
            yield text, {slot: text}, {}

    return steps


def _trained(row: Resolved) -> Iterator[Step]:
    """All weights, adapters, adapters over weights in 4 bits."""
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
        text = str(part).replace(f"rank={part.rank}", f"rank={rank}")
        named = text if f"rank={rank}" in text else f"{part.name}:rank={rank}"
        yield f"rank={rank}", {Slot.ADAPT: named}, {}


def _batch(row: Resolved) -> Iterator[Step]:
    """Half and twice the samples; and the same in more micro batches."""
    batch, micro = row.spec.global_batch, row.micro_batch
    for size in sorted({max(1, micro // 2), 2 * micro}):
        yield f"micro batch {size}", {}, {"global_batch": batch * size // micro}
    steps = 2 * row.recipe.accumulation
    yield f"accumulate:steps={steps}", {Slot.ACCUMULATE: f"accumulate:steps={steps}"}, {}


def _sample(axis: str, times: Sequence[float]) -> Callable[[Resolved], Iterator[Step]]:
    """Samples of about so many ``times`` the tokens."""

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
    """Half of the blocks' weights in host memory, and all of them."""
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
    """Twice the GPUs at the same micro batch, where something is shared among them."""
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
"""Knob -> its moves from a row."""

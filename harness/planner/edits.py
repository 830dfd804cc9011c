"""The one table of what a plan may change of a recipe, and the rows that follow from it: all valid
products of its values (``lattice``), one changed knob at a time (``moves``), and smaller micro
batches. Rows that conflict or are refused are left out. Does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from harness.resolve import Resolved, resolve
from strategies import parse
from strategies.base import BadInput, Slot
from strategies.strategy import Strategy
from strategies.streaming.block_swap import AT_ONCE

# ---- the table ----


SHARDINGS = {
    False: ("single", "zero2_offload", "zero3_offload"),
    True: ("ddp", "fsdp2", "zero2", "zero3", "fsdp2_offload", "zero2_offload", "zero3_offload"),
}
"""Several GPUs -> shardings, those that move the fewest bytes first."""
OFFLOADED = "_offload"
"""End of the names of shardings that keep weights or optimizer state in host memory."""
FOR_WHOLE = ("zero2", "zero2_offload")
"""Shardings that share or move gradients and optimizer state alone, of which adapters have few."""
WHOLE, PRODUCTS = "checkpoint", "checkpoint:keep=products"
"""Recomputation of whole blocks, and of all but matrix products.
Adapters skip the second: it keeps outputs of frozen products that their backward does not need."""
PARTS = (
    *(f"checkpoint:share={share:g}" for share in (0.25, 0.5, 0.75)),
    *(f"checkpoint:part={part}" for part in ("ffn", "attention")),
    "offload_activations",
)
"""Ways to keep part of the activations on the device, or all in host memory; tried where no block
is streamed and no engine offloads."""
MOVED = f"{WHOLE}+offload_activations:what=checkpoints"
"""Recomputation of whole blocks from inputs that wait in host memory."""
ADAPTERS = ("lora:rank=16", "cast:to=fp8+lora:rank=16", "qlora:rank=16")
"""Adapters over weights of 16, 8 and 4 bits."""
FUSED = "adafactor:write=stochastic+optimizer_in_backward"
"""Optimizer that steps streamed weights on the device, as trainers do; only with ``WHOLE``."""
IN_BACKWARD = "adafactor+optimizer_in_backward"
OPTIMIZERS = {
    "bf16_pure": ("adamw", "adam8bit", "adam4bit", "adafactor", IN_BACKWARD, FUSED),
    "bf16": ("adamw", "adam8bit"),
    "fp16": ("adamw", "adam8bit"),
}
"""Precision -> optimizers with which trainers train all weights."""
UNTRACED = ("adam4bit", "dtensor_weights")
"""An optimizer, and a trait of engines with which its step cannot be traced."""
ROUNDING = ("bf16_pure", "adamw")
"""Precision and optimizer that lose small updates.
They are combined only to stream blocks, which the host steps by no other optimizer."""
SHARES = (0.25, 0.5, 0.75)
"""Shares of the blocks that may be streamed, besides all but a few."""
OWN = {Slot.SHARD, Slot.PRECISION, Slot.SWAP, Slot.CAST, Slot.ADAPT, Slot.RECOMPUTE, Slot.OFFLOAD,
       Slot.OPTIMIZE, Slot.STEP}  # fmt: skip
"""Slots that a lattice fills; a recipe keeps its other parts."""
SAMPLES = {"resolution": (0.25, 0.5, 2.0), "frames": (0.5, 2.0)}
"""Axis of the samples -> about how many times the tokens."""
FINEST = 8
"""Most pieces into which a micro batch is split; each adds an accumulation step to the trace."""


# ---- one edit ----


Edit = Mapping[Slot, str]
"""Slot of a recipe -> its new strategy; an empty text leaves the slot to its default."""


def edited(row: Resolved, edit: Edit) -> str:
    """Return the text of ``row``'s recipe with the edit.

    Raises:
        BadInput: the recipe is invalid.
    """
    parts = {part.slot: str(part) for part in row.recipe.strategies}
    # Without an average in the spec, that slot must be empty and unnamed.
    no_average = {} if row.spec.ema > 0 else {Slot.AVERAGE: ""}
    text = "+".join(filter(None, (parts | no_average | edit).values()))
    return parse(text, ema=row.spec.ema > 0).text


def changed(row: Resolved, edit: Edit, processes: int, /, **fields: Any) -> Resolved | None:
    """Return ``row`` with the edit and with other ``fields`` of its spec, or None if it is invalid.
    It runs on ``processes`` processes, or on one if its launch file requires that."""
    try:
        text = edited(row, edit)
        ranks = 1 if parse(text).alone(row.spec.device) else processes
        given = {"recipe": text, "processes": ranks, **fields}
        found = resolve(dataclasses.replace(row.spec, **given))
    except BadInput:
        return None
    return None if found.refusal else found


def adapter(resolved: Resolved) -> Strategy | None:
    """Return the recipe's strategy whose adapters have a rank, or None."""
    part = resolved.recipe.in_slot(Slot.ADAPT)
    return part if hasattr(part, "rank") else None


def adapts(row: Resolved) -> bool:
    """Return True if ``row`` trains adapters or other parts, False if it trains all weights."""
    return "frozen_weights" in row.launch.traits


# ---- the lattice ----


def lattice(
    row: Callable[[str], Resolved],
    several: bool,
    half: Sequence[str],
    adapters: Sequence[str] = ADAPTERS,
    *,
    whole: bool = True,
) -> list[Resolved]:
    """Return every valid recipe of the lattice.
    ``row`` resolves a recipe and raises ``BadInput`` for an invalid one. ``half``: the 16-bit
    precisions of the card, with the purest first. ``whole``: with trainings of all weights."""
    found: dict[str, Resolved] = {}

    def valid(*parts: str, counts: Sequence[int] = (0,)) -> list[Resolved]:
        """Return the valid recipes with so many streamed blocks, up to a refused number."""
        some = []
        for count in counts:
            swap = f"block_swap:blocks={count}" if count else ""
            try:
                some.append(row("+".join(filter(None, (parts[0], swap, *parts[1:])))))
            except BadInput:
                if count:
                    break
        return some

    first = next((one for name in SHARDINGS[several] for one in valid(name)), None)
    counts = swaps(first.subject.depth) if first else []
    for sharding in SHARDINGS[several]:
        streamed = counts if valid(sharding, half[-1], WHOLE, counts=counts[:1]) else []
        plain = valid(sharding, half[-1], WHOLE)
        # An engine with a float32 master of what trains stores 16-bit weights itself.
        master = bool(plain) and "float_master" in plain[0].launch.traits
        known = half[-1:] if master else half
        columns = [] if sharding in FOR_WHOLE else [(known[0], one) for one in adapters]
        columns += [(one, optimizer) for one in known for optimizer in OPTIMIZERS[one] if whole]
        alone = () if sharding.endswith(OFFLOADED) else PARTS
        for level in ("", *alone, PRODUCTS, WHOLE, MOVED):
            for column in columns:
                if column[1] in adapters and level == PRODUCTS:
                    continue
                streams = level == WHOLE if column[1] == FUSED else level not in alone
                more = streamed if streams and column[1] != IN_BACKWARD else []
                none = [] if column[1] == FUSED or column == ROUNDING else [0]
                for one in valid(sharding, *column, level, counts=[*none, *more]):
                    if column[1] != UNTRACED[0] or UNTRACED[1] not in one.launch.traits:
                        found.setdefault(str(one.recipe), one)
    return list(found.values())


def swaps(depth: int) -> list[int]:
    """Return the numbers of streamed blocks to try for a model of ``depth`` blocks."""
    counts = {round(share * depth) for share in SHARES} | {depth - 2 * AT_ONCE}
    return sorted(count for count in counts if AT_ONCE < count <= depth)


def around(given: Resolved, processes: int, half: Sequence[str]) -> list[Resolved]:
    """Return the lattice on ``processes`` GPUs that trains what ``given`` trains, and keeps the
    parts that no lattice has."""
    part, known = given.recipe.in_slot(Slot.ADAPT), ADAPTERS
    if part and part.name in ("lora", "qlora"):
        known = tuple(text.replace("rank=16", f"rank={part.rank}") for text in ADAPTERS)
    elif part:
        known = (str(part), f"cast:to=fp8+{part}")

    def row(text: str) -> Resolved:
        own = {one.slot: str(one) for one in parse(text).strategies if one.slot in OWN}
        if not (found := changed(given, dict.fromkeys(OWN, "") | own, processes)):
            raise BadInput(text)
        return found

    return lattice(row, processes > 1, half, known if part else (), whole=part is None)


# ---- one knob at a time ----


class Move(NamedTuple):
    """One changed knob: its name, its new value in words, and the resulting row."""

    knob: str
    to: str
    row: Resolved


def moves(row: Resolved, processes: int) -> list[Move]:
    """Return all valid moves from ``row`` on ``processes`` GPUs, without duplicates."""
    known, found = {row.spec}, []
    for knob, to, edit, fields in _steps(row):
        made = changed(row, edit, processes, **fields)
        if made and made.spec not in known:
            known.add(made.spec)
            found.append(Move(knob, to or made.subject.size_in_words.partition(",")[0], made))
    return found


Step = tuple[str, str, Edit, dict[str, Any]]
"""(knob, new value in words, slots of the recipe, fields of the spec). An empty text means the
row's sample size."""


def _steps(row: Resolved) -> Iterator[Step]:
    """Yield changes of each knob, those that cost a training the least first."""

    def places(knob: str, slot: Slot, *texts: str, none: str = "") -> Iterator[Step]:
        """Yield the empty slot, called ``none``, and each of ``texts`` for it."""
        if none and row.recipe.in_slot(slot):
            yield knob, none, {slot: ""}, {}
        yield from ((knob, text, {slot: text}, {}) for text in texts)

    micro, depth, part = row.micro_batch, row.subject.depth, adapter(row)
    several, batch = row.spec.processes > 1, row.spec.global_batch
    ways = (PARTS[1], WHOLE, f"{WHOLE}:every=sqrt", f"{WHOLE}:keep=nothing")
    yield from places("recompute", Slot.RECOMPUTE, *ways, none="no checkpoints")
    for size in sorted({max(1, micro // 2), 2 * micro}):
        yield "batch", f"micro batch {size}", {}, {"global_batch": batch * size // micro}
    accumulated = f"accumulate:steps={2 * row.recipe.accumulation}"
    yield from places("batch", Slot.ACCUMULATE, accumulated)
    yield from places("offload", Slot.SHARD, *SHARDINGS[False][1:])
    what = ":what=checkpoints" if row.recipe.in_slot(Slot.RECOMPUTE) else ""
    away = () if row.recipe.in_slot(Slot.OFFLOAD) else (f"offload_activations{what}",)
    yield from places("offload", Slot.OFFLOAD, *away, none="activations stay")
    streamed = (f"block_swap:blocks={count}" for count in (depth // 2, depth))
    yield from places("blocks", Slot.SWAP, *streamed, none="all stay")
    yield from places("optimizer", Slot.OPTIMIZE, "adamw", "adam8bit", "adafactor")
    narrow = ("cast:to=fp8", "cast:to=int8")
    yield from places("frozen weights", Slot.CAST, *narrow, none="as they are")
    sharded = ("ddp", "zero1", "zero2", "zero3", "fsdp2") if several else ()
    yield from places("sharding", Slot.SHARD, *sharded)
    yield from places("precision", Slot.PRECISION, "fp32", "bf16", "bf16_pure", "fp8")
    yield from places("step", Slot.STEP, "optimizer_in_backward", none="after backward")
    known = (f"qlora:rank={part.rank}",) if part else (ADAPTERS[0], ADAPTERS[2])
    yield from places("trained", Slot.ADAPT, *known, none="all weights")
    for rank in (max(1, part.rank // 4), 4 * part.rank) if part else ():
        text = str(dataclasses.replace(part, rank=rank))
        yield "rank", f"rank={rank}", {Slot.ADAPT: text}, {}
    averages = ("ema:place=none", "ema:place=cpu") if row.spec.ema > 0 else ()
    yield from places("average", Slot.AVERAGE, *averages)
    for axis, times in SAMPLES.items():
        sizes = row.subject.samples_up(axis)
        for share in times if sizes else ():
            fields, _ = min(sizes, key=lambda size, share=share: abs(size[1] - share))
            yield axis, "", {}, dict(fields)
    if several:
        twice = 2 * row.spec.processes
        yield "GPUs", f"{twice} GPUs", {}, {"processes": twice, "global_batch": 2 * batch}


def smaller(row: Resolved, processes: int) -> list[Resolved]:
    """Return the recipe with its micro batch in up to ``FINEST`` pieces, at the same batch."""
    micro, times = row.micro_batch, range(2, FINEST + 1)
    steps = [row.recipe.accumulation * count for count in times if micro % count == 0]
    edits = ({Slot.ACCUMULATE: f"accumulate:steps={count}"} for count in steps)
    return [found for edit in edits if (found := changed(row, edit, processes))]

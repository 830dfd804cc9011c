"""Changes of a recipe: one knob at a time for ``plan --advise``, and what may fit if nothing does.

A knob is a slot of the recipe (checkpoints, precision, optimizer, sharding) or a size of the spec
(batch, resolution, frames, GPUs). Each changed row gets its own prediction; those that conflict or
are refused are left out. Does not import torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.planner import verdict
from harness.planner.verdict import Fit
from harness.resolve import Resolved, resolve
from strategies import parse
from strategies.advice import lighter
from strategies.base import BadInput, Slot
from strategies.strategy import Strategy
from strategies.streaming.block_swap import AT_ONCE

# ---- Edits of a recipe ----


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

    It runs on ``processes`` processes, or on one if its launch file requires that.
    """
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


# ---- One knob at a time ----


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


Step = tuple[str, Edit, dict[str, Any]]
"""(new value in words, slots of the recipe, fields of the spec). An empty text means the row's
sample size."""


def moves(row: Resolved, processes: int) -> list[Move]:
    """Return all valid moves from ``row`` on ``processes`` GPUs, without duplicates."""
    known, found = {row.spec}, []
    for name, knob in KNOBS.items():
        for to, edit, fields in knob.steps(row):
            made = changed(row, edit, processes, **fields)
            if made and made.spec not in known:
                known.add(made.spec)
                found.append(
                    Move(knob=name, to=to or made.subject.size_in_words.partition(",")[0], row=made)
                )
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


class Knob(NamedTuple):
    """``steps`` yields changes of a row. ``frees``: categories that they make smaller, if the same
    weights go on to train."""

    steps: Callable[[Resolved], Iterator[Step]]
    frees: Sequence[str] = ()


RECOMPUTED = ("activations", "autocast", "temporaries")
GROWING = ("activations", "recomputed", "temporaries")
"""Categories that grow with the micro batch."""
KNOBS: dict[str, Knob] = {
    "recompute": Knob(_places(Slot.RECOMPUTE, RECOMPUTE, "no checkpoints"), RECOMPUTED),
    "batch": Knob(_batch, GROWING),
    "offload": Knob(_offload, ("activations",)),
    "blocks": Knob(_swap, ("parameters",)),
    "optimizer": Knob(_places(Slot.OPTIMIZE, OPTIMIZE), ("optimizer_state",)),
    "frozen weights": Knob(
        _places(Slot.CAST, ("cast:to=fp8", "cast:to=int8"), "as they are"), ("parameters",)
    ),
    "sharding": Knob(_shard, ("parameters", "optimizer_state", "gradients")),
    "precision": Knob(_places(Slot.PRECISION, PRECISION)),
    "step": Knob(_places(Slot.STEP, ("optimizer_in_backward",), "after backward")),
    "trained": Knob(_trained),
    "rank": Knob(_rank),
    "average": Knob(_average),
    "resolution": Knob(_sample("resolution", (0.25, 0.5, 2.0))),
    "frames": Knob(_sample("frames", (0.5, 2.0))),
    "GPUs": Knob(_gpus),
}
"""Knobs by name, those that cost a training the least first."""


def freeing(close: Fit, processes: int) -> list[Resolved]:
    """Return rows with one moved knob that may free what ``close`` lacks, at no larger batch."""
    able = [name for name, knob in KNOBS.items() if knob.frees and holds_enough(close, knob.frees)]
    found = [move.row for move in moves(close.resolved, processes) if move.knob in able]
    return [row for row in found if row.micro_batch <= close.resolved.micro_batch]


# ---- Recipes that fit if none of a plan does ----


Ask = Callable[[list[Resolved], str], list[Fit]]
"""(rows, reason for asking in words) -> their fits."""

EXACT, MIXED = ("fp32", "tf32"), ("bf16", "bf16_master")
FINEST = 8
"""Most pieces into which a micro batch is split; each adds an accumulation step to the trace."""
WIDER = (2, 4, 8)
"""Multiples of the requested GPUs that are tried last."""


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Suggested recipes on the plan's GPUs (``tried``) and on more GPUs (``wider``)."""

    tried: list[Fit]
    wider: list[Fit] = field(default_factory=list)

    @property
    def able(self) -> list[Fit]:
        """Suggestions that fit the plan's GPUs, the fastest first."""
        able = [fit for fit in self.tried if fit.fits]
        return sorted(able, key=lambda fit: -(fit.samples_per_second or 0))


def seek(fits: Sequence[Fit], processes: int, ask: Ask) -> Ways | None:
    """Search for recipes that fit ``processes`` GPUs; return None if one of ``fits`` already does.

    One part is changed at a time, then more and more together, then the number of GPUs. The search
    stops at the first group with a recipe that fits.
    """
    close = verdict.nearest(fits)
    if close is None or any(fit.fits for fit in fits):
        return None
    known = {_key(fit.resolved) for fit in fits}
    tried: list[Fit] = []
    more = list(_together(close.resolved, processes))
    pairs = [more[at : at + 2] for at in range(0, len(more), 2)]
    alone = (changed(close.resolved, edit, processes) for edit in _edits(close, processes))
    for rows in (alone, *pairs):
        tried += ask(list(_new(rows, known)), "None fits; trying changes: ")
        if any(fit.fits for fit in tried):
            return Ways(tried=tried)
    sharded = [fit for fit in (close, *tried) if "shards" in fit.resolved.launch.traits]
    least = verdict.nearest(sharded)
    # More processes on one CPU add no memory.
    more_help = least and not close.gpu.shared
    rows = list(_on_more_gpus(least.resolved)) if more_help else []
    return Ways(tried=tried, wider=ask(rows, "None of these fits; trying more GPUs: "))


def _key(row: Resolved) -> tuple[str, int]:
    return str(row.recipe), row.spec.processes


def _new(rows: Iterable[Resolved | None], known: set[tuple[str, int]]) -> Iterator[Resolved]:
    """Yield the valid rows that are not in ``known``, and add them to it."""
    for row in rows:
        if row and _key(row) not in known:
            known.add(_key(row))
            yield row


# ---- Changed recipes ----


def _lighter(row: Resolved, processes: int) -> dict[str, Edit]:
    """Return what to change -> the edit that needs less memory for the same training; an empty
    edit if there is none."""

    def plain(slot: Slot, text: str) -> bool:
        """Return True if the slot holds its default, whose text is ``text``."""
        return str(row.recipe.in_slot(slot)) == text

    precision, part = (row.recipe.in_slot(slot) for slot in (Slot.PRECISION, Slot.RECOMPUTE))
    sizes, shardings = _smaller_sizes(row), lighter(row.recipe.sharding.alike(), processes)
    fewer = "checkpoint" + ":keep=nothing" * (str(part) == "checkpoint")
    # Without float32 weights, by an optimizer that keeps what bf16 rounds.
    alone = {Slot.PRECISION: "bf16_pure", Slot.OPTIMIZE: "adamw_bf16"}
    adamw, here = plain(Slot.OPTIMIZE, "adamw"), row.launch.engine.place("parameters") == "device"
    return {
        "precision": {Slot.PRECISION: "bf16"} if precision.name in EXACT else {},
        "master": alone if precision.name in MIXED and adamw else {},
        "recompute": {} if part and part.keep == "nothing" else {Slot.RECOMPUTE: fewer},
        "sharding": {Slot.SHARD: shardings[-1]} if shardings else {},
        "optimizer": {Slot.OPTIMIZE: "adam8bit"} if adamw else {},
        "average": {Slot.AVERAGE: "ema:place=cpu"} if plain(Slot.AVERAGE, "ema") else {},
        "batch": _in_micro_batches_of(sizes[0], row) if sizes else {},
        "offload": {Slot.SHARD: "zero3_offload"} if here else {},
    }


def _edits(close: Fit, processes: int) -> Iterator[Edit]:
    """Yield edits of one part, without those that free fewer bytes at the peak than are missing."""
    row, found = close.resolved, _lighter(close.resolved, processes)
    yield from ({Slot.SHARD: name} for name in lighter(row.recipe.sharding.alike(), processes))
    yield found["precision"] or found["master"]
    if holds_enough(close, RECOMPUTED):
        yield found["recompute"]
    if holds_enough(close, ("parameters",)):
        yield _swapping(close)
    if holds_enough(close, ("activations",)):
        what = ":what=checkpoints" if row.recipe.in_slot(Slot.RECOMPUTE) else ""
        yield {Slot.OFFLOAD: f"offload_activations{what}"}
    if holds_enough(close, ("optimizer_state",)):
        yield found["optimizer"]
    if holds_enough(close, ("ema",)):
        yield found["average"]
    yield from (_in_micro_batches_of(size, row) for size in _fitting_sizes(close)[:2])


TOGETHER = ("precision", "recompute", "sharding", "average", "batch", "batch", "offload")
"""Edits in the order in which they are combined; those that cost the most speed come last."""


def _together(row: Resolved, processes: int) -> Iterator[Resolved]:
    """Yield rows with more and more changes together, each from the row of the last valid one."""
    for name in TOGETHER:
        if found := changed(row, _lighter(row, processes)[name], processes):
            row = found
            yield row


def _swapping(close: Fit) -> Edit:
    """Return a swap of just enough blocks to free what is missing."""
    row, instant = close.resolved, close.prediction.peak
    depth = row.subject.depth
    if instant is None or row.recipe.in_slot(Slot.SWAP) or not instant.categories["parameters"]:
        return {}
    each = instant.categories["parameters"] / max(1, depth)
    count = max(1, math.ceil(-close.room_bytes / each)) + AT_ONCE
    return {Slot.SWAP: f"block_swap:blocks={count}"} if count <= depth else {}


def holds_enough(close: Fit, categories: Sequence[str]) -> bool:
    """Return True if these categories hold at the peak at least as many bytes as are missing."""
    instant = close.prediction.peak
    if instant is None:
        return True
    return sum(instant.categories[name] for name in categories) >= -close.room_bytes


def _smaller_sizes(resolved: Resolved) -> list[int]:
    """Return the smaller sizes into which the micro batch can be split, the largest first."""
    batch = resolved.micro_batch
    least = -(-batch // FINEST)
    return [size for size in range(batch - 1, least - 1, -1) if batch % size == 0]


def _fitting_sizes(close: Fit) -> list[int]:
    """Return the ``_smaller_sizes`` whose peak should fit, in proportion to the batch."""
    instant, sizes = close.prediction.peak, _smaller_sizes(close.resolved)
    if instant is None:
        return sizes
    growing = sum(instant.categories[name] for name in GROWING)
    room = growing + close.room_bytes
    return [size for size in sizes if size * growing <= close.resolved.micro_batch * room]


def _in_micro_batches_of(size: int, resolved: Resolved) -> Edit:
    """Return an edit that accumulates over more steps, so that the micro batch becomes ``size``."""
    steps = resolved.recipe.accumulation * resolved.micro_batch // size
    return {Slot.ACCUMULATE: f"accumulate:steps={steps}"}


def _on_more_gpus(row: Resolved) -> Iterator[Resolved]:
    """Yield the same recipe on more GPUs, at the same global batch.

    If the global batch does not divide by the ranks, the micro batch stays the same instead.
    """
    spec = row.spec
    for times in WIDER:
        ranks = times * spec.processes
        whole = spec.global_batch % (ranks * row.recipe.accumulation) == 0
        batch = spec.global_batch if whole else spec.global_batch * times
        wider = resolve(dataclasses.replace(spec, processes=ranks, global_batch=batch))
        if not wider.refusal:
            yield wider

"""Changes of a recipe: one knob at a time for ``plan --advise``, and what may fit if nothing does.
A knob is a slot of the recipe (checkpoints, precision, optimizer, sharding) or a size of the spec
(batch, resolution, frames, GPUs). Each changed row gets its own prediction; those that conflict or
are refused are left out. Does not import torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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


USUAL_ADAPTER = "lora:rank=16"
RECOMPUTE = tuple(
    "checkpoint" + more for more in (":share=0.5", "", ":every=sqrt", ":keep=nothing")
)
PRECISION = ("fp32", "bf16", "bf16_pure", "fp8")
OPTIMIZE = ("adamw", "adam8bit", "adafactor")
FROZEN = ("cast:to=fp8", "cast:to=int8")
SHARD = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
OFFLOAD = ("zero2_offload", "zero3_offload")
SAMPLES = {"resolution": (0.25, 0.5, 2.0), "frames": (0.5, 2.0)}
"""Axis of the samples -> about how many times the tokens."""
RECOMPUTED = ("activations", "autocast", "temporaries")
GROWING = ("activations", "recomputed", "temporaries")
"""Categories that grow with the micro batch."""
FREES: dict[str, Sequence[str]] = {
    "recompute": RECOMPUTED,
    "batch": GROWING,
    "offload": ("activations",),
    "blocks": ("parameters",),
    "optimizer": ("optimizer_state",),
    "frozen weights": ("parameters",),
    "sharding": ("parameters", "optimizer_state", "gradients"),
}
"""Knob -> categories that it makes smaller while the same weights go on to train."""


class Move(NamedTuple):
    """One changed knob: its name, its new value in words, and the resulting row."""

    knob: str
    to: str
    row: Resolved


def moves(row: Resolved, processes: int) -> list[Move]:
    """Return all valid moves from ``row`` on ``processes`` GPUs, without duplicates."""
    known, found = {row.spec}, []
    for knob, to, edit, fields in (*_steps_of_recipe(row), *_steps_of_sizes(row)):
        made = changed(row, edit, processes, **fields)
        if made and made.spec not in known:
            known.add(made.spec)
            found.append(Move(knob, to or made.subject.size_in_words.partition(",")[0], made))
    return found


Step = tuple[str, str, Edit, dict[str, Any]]
"""(knob, new value in words, slots of the recipe, fields of the spec). An empty text means the
row's sample size."""


def _steps_of_recipe(row: Resolved) -> Iterator[Step]:
    """Yield changes of each knob, those that cost a training the least first."""

    def places(knob: str, slot: Slot, texts: Sequence[str], none: str = "") -> Iterator[Step]:
        """Yield the empty slot, called ``none``, and each of ``texts`` for it."""
        if none and row.recipe.in_slot(slot):
            yield knob, none, {slot: ""}, {}
        yield from ((knob, text, {slot: text}, {}) for text in texts)

    yield from places("recompute", Slot.RECOMPUTE, RECOMPUTE, "no checkpoints")
    micro, depth, part = row.micro_batch, row.subject.depth, adapter(row)
    for size in sorted({max(1, micro // 2), 2 * micro}):
        batch = {"global_batch": row.spec.global_batch * size // micro}
        yield "batch", f"micro batch {size}", {}, batch
    accumulated = f"accumulate:steps={2 * row.recipe.accumulation}"
    yield from places("batch", Slot.ACCUMULATE, [accumulated])
    yield from places("offload", Slot.SHARD, OFFLOAD)
    away = [] if row.recipe.in_slot(Slot.OFFLOAD) else [_offloaded(row)]
    yield from places("offload", Slot.OFFLOAD, away, "activations stay")
    swaps = [f"block_swap:blocks={count}" for count in (depth // 2, depth)]
    yield from places("blocks", Slot.SWAP, swaps, "all stay")
    yield from places("optimizer", Slot.OPTIMIZE, OPTIMIZE)
    yield from places("frozen weights", Slot.CAST, FROZEN, "as they are")
    yield from places("sharding", Slot.SHARD, SHARD if row.spec.processes > 1 else ())
    yield from places("precision", Slot.PRECISION, PRECISION)
    yield from places("step", Slot.STEP, ["optimizer_in_backward"], "after backward")
    adapters = [f"qlora:rank={part.rank}"] if part else [USUAL_ADAPTER, "qlora:rank=16"]
    yield from places("trained", Slot.ADAPT, adapters, "all weights")
    for rank in (max(1, part.rank // 4), 4 * part.rank) if part else ():
        text = str(dataclasses.replace(part, rank=rank))
        yield "rank", f"rank={rank}", {Slot.ADAPT: text}, {}
    averages = ["ema:place=none", "ema:place=cpu"] if row.spec.ema > 0 else []
    yield from places("average", Slot.AVERAGE, averages)


def _steps_of_sizes(row: Resolved) -> Iterator[Step]:
    """Yield samples of other sizes, and twice the GPUs at the same micro batch."""
    for axis, times in SAMPLES.items():
        sizes = row.subject.samples_up(axis)
        for share in times if sizes else ():
            fields, _ = min(sizes, key=lambda size, share=share: abs(size[1] - share))
            yield axis, "", {}, dict(fields)
    if row.spec.processes > 1:
        twice = 2 * row.spec.processes
        more = {"processes": twice, "global_batch": 2 * row.spec.global_batch}
        yield "GPUs", f"{twice} GPUs", {}, more


def _offloaded(row: Resolved) -> str:
    what = ":what=checkpoints" if row.recipe.in_slot(Slot.RECOMPUTE) else ""
    return f"offload_activations{what}"


def freeing(close: Fit, processes: int) -> list[Resolved]:
    """Return rows with one moved knob that may free what ``close`` lacks, at no larger batch."""
    able = [knob for knob, frees in FREES.items() if holds_enough(close, frees)]
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
    def on_more(self) -> Fit | None:
        """The suggestion that fits on the fewest more GPUs."""
        return next((fit for fit in self.wider if fit.fits), None)

    @property
    def able(self) -> list[Fit]:
        """Suggestions that fit the plan's GPUs, the fastest first."""
        able = [fit for fit in self.tried if fit.fits]
        return sorted(able, key=lambda fit: -(fit.samples_per_second or 0))


def seek(fits: Sequence[Fit], processes: int, ask: Ask) -> Ways | None:
    """Search for recipes that fit ``processes`` GPUs; return None if one of ``fits`` already does.
    One part is changed at a time, then more and more together, then the number of GPUs. The search
    stops at the first group with a recipe that fits."""
    close = verdict.nearest(fits)
    if close is None or any(fit.fits for fit in fits):
        return None
    known = {(str(fit.resolved.recipe), fit.resolved.spec.processes) for fit in fits}
    tried: list[Fit] = []
    row, more = close.resolved, []
    for name in TOGETHER:  # each from the row of the last valid one
        if found := changed(row, _lighter(row, processes)[name], processes):
            row = found
            more.append(row)
    pairs = [more[at : at + 2] for at in range(0, len(more), 2)]
    alone = (changed(close.resolved, edit, processes) for edit in _edits(close, processes))
    for rows in (alone, *pairs):
        new: dict[tuple[str, int], Resolved] = {}
        for one in filter(None, rows):
            new.setdefault((str(one.recipe), one.spec.processes), one)
        asked = [one for key, one in new.items() if key not in known]
        known |= new.keys()
        tried += ask(asked, "None fits; trying changes: ")
        if any(fit.fits for fit in tried):
            return Ways(tried=tried)
    sharded = [fit for fit in (close, *tried) if "shards" in fit.resolved.launch.traits]
    least = verdict.nearest(sharded)
    # More processes on one CPU add no memory.
    more_help = least and not close.gpu.shared
    rows = list(_on_more_gpus(least.resolved)) if more_help else []
    return Ways(tried=tried, wider=ask(rows, "None of these fits; trying more GPUs: "))


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
    row, found, instant = close.resolved, _lighter(close.resolved, processes), close.prediction.peak
    yield from ({Slot.SHARD: name} for name in lighter(row.recipe.sharding.alike(), processes))
    yield found["precision"] or found["master"]
    if holds_enough(close, RECOMPUTED):
        yield found["recompute"]
    held, depth = instant.categories["parameters"] if instant else 0, row.subject.depth
    if held and not row.recipe.in_slot(Slot.SWAP) and holds_enough(close, ("parameters",)):
        # Just enough blocks to free what is missing.
        count = max(1, math.ceil(-close.room_bytes / (held / max(1, depth)))) + AT_ONCE
        if count <= depth:
            yield {Slot.SWAP: f"block_swap:blocks={count}"}
    if holds_enough(close, ("activations",)):
        yield {Slot.OFFLOAD: _offloaded(row)}
    if holds_enough(close, ("optimizer_state",)):
        yield found["optimizer"]
    if holds_enough(close, ("ema",)):
        yield found["average"]
    sizes = _smaller_sizes(row)
    if instant:  # those whose peak should fit, in proportion to the batch
        growing = sum(instant.categories[name] for name in GROWING)
        room = row.micro_batch * (growing + close.room_bytes)
        sizes = [size for size in sizes if size * growing <= room]
    yield from (_in_micro_batches_of(size, row) for size in sizes[:2])


TOGETHER = ("precision", "recompute", "sharding", "average", "batch", "batch", "offload")
"""Edits in the order in which they are combined; those that cost the most speed come last."""


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


def _in_micro_batches_of(size: int, resolved: Resolved) -> Edit:
    """Return an edit that accumulates over more steps, so that the micro batch becomes ``size``."""
    steps = resolved.recipe.accumulation * resolved.micro_batch // size
    return {Slot.ACCUMULATE: f"accumulate:steps={steps}"}


def _on_more_gpus(row: Resolved) -> Iterator[Resolved]:
    """Yield the same recipe on more GPUs, at the same global batch.
    If the global batch does not divide by the ranks, the micro batch stays the same instead."""
    spec = row.spec
    for times in WIDER:
        ranks = times * spec.processes
        whole = spec.global_batch % (ranks * row.recipe.accumulation) == 0
        batch = spec.global_batch if whole else spec.global_batch * times
        wider = resolve(dataclasses.replace(spec, processes=ranks, global_batch=batch))
        if not wider.refusal:
            yield wider

"""Suggestions for a plan in which no recipe fits: other recipes, each predicted like the plan's
own.

They change parts of the recipe that is nearest to fitting. Changes that conflict or are refused are
left out. Does not import torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.planner import verdict
from harness.planner.verdict import Fit
from harness.resolve import Resolved, resolve
from strategies import parse
from strategies.advice import lighter
from strategies.base import BadInput, Slot
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


Ask = Callable[[list[Resolved], str], list[Fit]]
"""(rows, reason for asking in words) -> their fits."""

EXACT, MIXED = ("fp32", "tf32"), ("bf16", "bf16_master")
RECOMPUTED = ("activations", "autocast", "temporaries")
GROWING = ("activations", "recomputed", "temporaries")
"""Categories that grow with the micro batch."""
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


def _edits(close: Fit, processes: int) -> Iterator[Edit]:
    """Yield edits of one part, without those that free fewer bytes at the peak than are missing."""
    row = close.resolved
    yield from _shardings(row, processes)
    yield _in_bf16(row) or _in_bf16_alone(row)
    if holds_enough(close, RECOMPUTED):
        yield _recomputing(row)
    if holds_enough(close, ("parameters",)):
        yield _swapping(close)
    if holds_enough(close, ("activations",)):
        what = ":what=checkpoints" if row.recipe.in_slot(Slot.RECOMPUTE) else ""
        yield {Slot.OFFLOAD: f"offload_activations{what}"}
    if holds_enough(close, ("optimizer_state",)) and _plain(row, Slot.OPTIMIZE, "adamw"):
        yield {Slot.OPTIMIZE: "adam8bit"}
    if holds_enough(close, ("ema",)):
        yield _average_on_host(row)
    for size in _fitting_sizes(close)[:2]:
        yield _in_micro_batches_of(size, row)


def _together(row: Resolved, processes: int) -> Iterator[Resolved]:
    """Yield rows with more and more changes together; those that cost the most speed come last.

    Each step starts from the row of the last valid step.
    """
    steps: list[Callable[[Resolved], Edit]] = [
        _in_bf16,
        _recomputing,
        lambda now: ({}, *_shardings(now, processes))[-1],
        _average_on_host,
        _smaller_batch,
        _smaller_batch,
        _offloaded,
    ]
    for step in steps:
        found = changed(row, step(row), processes)
        if found:
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


def _in_bf16(row: Resolved) -> Edit:
    exact = row.recipe.in_slot(Slot.PRECISION).name in EXACT
    return {Slot.PRECISION: "bf16"} if exact else {}


def _in_bf16_alone(row: Resolved) -> Edit:
    """Return an edit without float32 weights, by an optimizer that keeps what bf16 rounds."""
    mixed = row.recipe.in_slot(Slot.PRECISION).name in MIXED
    if not mixed or not _plain(row, Slot.OPTIMIZE, "adamw"):
        return {}
    return {Slot.PRECISION: "bf16_pure", Slot.OPTIMIZE: "adamw_bf16"}


def _average_on_host(row: Resolved) -> Edit:
    return {Slot.AVERAGE: "ema:place=cpu"} if _plain(row, Slot.AVERAGE, "ema") else {}


def _smaller_batch(row: Resolved) -> Edit:
    sizes = _smaller_sizes(row)
    return _in_micro_batches_of(sizes[0], row) if sizes else {}


def _offloaded(row: Resolved) -> Edit:
    on_device = row.launch.engine.place("parameters") == "device"
    return {Slot.SHARD: "zero3_offload"} if on_device else {}


def _plain(row: Resolved, slot: Slot, text: str) -> bool:
    """Return True if the slot holds its default, whose text is ``text``."""
    return str(row.recipe.in_slot(slot)) == text


def _shardings(row: Resolved, processes: int) -> Iterator[Edit]:
    for name in lighter(row.recipe.sharding.alike(), processes):
        yield {Slot.SHARD: name}


def _recomputing(row: Resolved) -> Edit:
    """Return the next checkpoint setting that keeps less; empty if none does."""
    part = row.recipe.in_slot(Slot.RECOMPUTE)
    if part and part.keep == "nothing":
        return {}
    return {Slot.RECOMPUTE: "checkpoint" + ":keep=nothing" * (str(part) == "checkpoint")}


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

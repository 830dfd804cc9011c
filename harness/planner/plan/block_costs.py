"""Costs of a block under each choice for it, from traces of shallow models (``plan --solve``).

The difference of two depths is the cost of one block of a group. Does not import torch.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.planner.phase_needs import STEP
from harness.planner.speed.roofline import BUSY, Seconds, seconds
from harness.planner.suggestions import Edit, changed
from harness.planner.verdict import Fit
from harness.prediction import Prediction, Work
from harness.resolve import Resolved
from harness.subjects import kind_of
from harness.system.cards import Card
from strategies.activations.runners import compact
from strategies.base import BadInput, Slot
from strategies.streaming.block_swap import AT_ONCE, spread

if TYPE_CHECKING:
    from harness.planner.plan.tracing import Asking

FEW = 2
"""Blocks of a group in the shallow model, and the number added in a deeper one."""
TWICE = "dual_attention_layers"
"""Key of a configuration whose value lists blocks."""


class Choice(NamedTuple):
    """Treatment of a block: the strategies if all blocks take it, and its letters in plans."""

    name: str
    recompute: str
    offload: str
    letters: str


CHOICES = (
    Choice("offload", "", "offload_activations", "ko"),
    Choice("recompute from the host", "checkpoint", "offload_activations:what=checkpoints", "ro"),
    Choice("recompute", "checkpoint", "", "rk"),
    Choice("recompute the FFN", "checkpoint:part=ffn", "", "fk"),
    Choice("keep", "", "", "kk"),
)
"""Choices in the order in which blocks of a group take them.

Recomputation needs the least memory before blocks that keep: these are freed by then.
"""
RECOMPUTE, FFN, KEEP = 2, 3, 4
HOSTED = (0, 1)
"""Indices of choices."""
Counts = tuple[tuple[int, ...], ...]
"""Number of blocks of each group that take each choice."""


class Plan(NamedTuple):
    """Choices of all blocks, and the number of streamed blocks."""

    counts: Counts
    swapped: int = 0

    @property
    def edit(self) -> Edit:
        """The parts of its recipe; of equal choices the usual ones, without a plan."""
        all_of = [
            CHOICES[c] for group in self.counts for c, n in enumerate(group) for _ in range(n)
        ]
        swap = f"block_swap:blocks={self.swapped}" if self.swapped else ""
        if len(set(all_of)) == 1:
            return edit_of(all_of[0], swap)
        again, moved = ("".join(one.letters[i] for one in all_of) for i in (0, 1))
        parts = {Slot.RECOMPUTE: "", Slot.OFFLOAD: "", Slot.SWAP: swap}
        if {*again} != {"k"}:
            parts[Slot.RECOMPUTE] = f"checkpoint:plan={compact(again)}"
        if "o" in moved:
            parts[Slot.OFFLOAD] = f"offload_activations:plan={compact(moved)}"
        return parts


def edit_of(choice: Choice, swap: str = "") -> Edit:
    """Return the parts of a recipe in which all blocks take ``choice``."""
    return {Slot.RECOMPUTE: choice.recompute, Slot.OFFLOAD: choice.offload, Slot.SWAP: swap}


# ---- shallow models ----


def groups_of(row: Resolved) -> dict[str, int]:
    """Return group -> number of its blocks.

    Raises:
        BadInput: the model has no shallower one.
    """
    found = dict(row.subject.depths)
    if not found and not kind_of(row.spec.model).brings_samples:
        found = {"depth": row.subject.depth}
    if not found:
        raise BadInput(
            f"--solve traces shallow models, and model {row.spec.model} has none of the same blocks"
        )
    return found


def shallow(row: Resolved, depths: Mapping[str, int], edit: Edit) -> Resolved | None:
    """Return the row of a model with ``depths`` blocks in each group; None if it is invalid."""
    if "depth" in depths:
        name, _, sizes = row.spec.model.partition(":")
        others = [s for s in sizes.split(",") if s and not re.match(r"depth=", s)]
        own = ",".join([*others, f"depth={depths['depth']}"])
        return changed(row, edit, 1, model=f"{name}:{own}")
    own = {key: str(count) for key, count in depths.items()}
    if TWICE in own:
        own |= {TWICE: str([*range(depths[TWICE])]).replace(" ", "")}
        own["num_layers"] = str(depths[TWICE] + depths["num_layers"])
    sized = ",".join(filter(None, [row.spec.set, *(f"{k}={v}" for k, v in own.items())]))
    return changed(row, edit, 1, set=sized)


# ---- what is traced ----


class Measure(NamedTuple):
    """Sizes of a prediction, or their differences: bytes beyond the state and of all live tensors
    in forward and backward, bytes of host memory, and operations of a step."""

    beyond: float
    live: float
    host: float
    work: Mapping[Work, float]

    def plus(self, other: Measure, times: float = 1.0) -> Measure:
        """Return the sum with ``times`` the other."""
        work = Counter(self.work)
        for one, count in other.work.items():
            work[one] += times * count
        sums = (a + times * b for a, b in zip(self[:3], other[:3], strict=True))
        return Measure(*sums, work)


NOTHING = Measure(0.0, 0.0, 0.0, {})


def measured(found: Prediction) -> Measure:
    """Return the sizes of a prediction."""
    beyond = max((found.beyond.get(phase, 0) for phase in BUSY), default=0)
    live = max((found.phases.get(phase, 0) for phase in BUSY), default=0)
    work: Counter[Work] = Counter()
    for one in found.work:
        work[replace(one, count=1)] += one.count
    return Measure(beyond, live, found.host.bytes if found.host else 0, work)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a training's blocks on ``gpu``.

    ``groups``: number of blocks of each. ``blocks[g][c]``: one block of a group under a choice.
    ``beside[c]``: bytes at the peak beside what blocks keep, as of the block that recomputes.
    ``swaps``: number of streamed blocks -> what they add. ``anchor``: the recipe in which all
    blocks recompute, predicted whole. ``off`` and ``host_off``: bytes that whole predictions
    needed more.
    """

    gpu: Card
    anchor: Fit
    groups: tuple[int, ...]
    blocks: tuple[tuple[Measure, ...], ...]
    beside: tuple[float, ...]
    swaps: Mapping[int, Measure]
    off: float = 0.0
    host_off: float = 0.0
    absent: frozenset[tuple[int, int]] = field(default=frozenset())

    @property
    def uniform(self) -> Plan:
        """The plan of the anchor."""
        return Plan(tuple(_only(RECOMPUTE, count) for count in self.groups))

    @functools.cached_property
    def rest(self) -> Measure:
        """Sizes of the anchor without those of its blocks."""
        found = measured(self.anchor.prediction)
        for count, group in zip(self.groups, self.blocks, strict=True):
            found = found.plus(group[RECOMPUTE], -count)
        return found

    @functools.cached_property
    def needs(self) -> tuple[float, float]:
        """Bytes that the anchor needs in forward and backward, and in all else."""
        phases, step = self.anchor.prediction.phases, self.anchor.phases[STEP].gpu
        busy, rest = (
            max((size for name, size in phases.items() if (name in BUSY) is here), default=0)
            for here in (True, False)
        )
        others = [one.gpu for name, one in self.anchor.phases.items() if name != STEP]
        most = max(busy, rest)
        return step - (most - busy), max([step - (most - rest), *others])

    def level(self, counts: Counts) -> float:
        """Return the most bytes beyond the state: at the backward pass of each run of blocks."""
        kept = most = 0.0
        for group, costs in zip(counts, self.blocks, strict=True):
            for number, cost, beside in zip(group, costs, self.beside, strict=True):
                kept += number * cost.beyond
                most = max(most, kept + beside) if number else most
        return most

    def need(self, plan: Plan) -> float:
        """Return the bytes that a GPU needs."""
        busy, rest = self.needs
        busy += self.level(plan.counts) - self.level(self.uniform.counts)
        return max(busy, rest) + self.swaps[plan.swapped].live + self.off

    def total(self, plan: Plan) -> Measure:
        """Return the sums over all blocks."""
        found = self.rest.plus(self.swaps[plan.swapped])
        for group, costs in zip(plan.counts, self.blocks, strict=True):
            for number, cost in zip(group, costs, strict=True):
                found = found.plus(cost, number) if number else found
        return found

    def seconds(self, plan: Plan) -> Seconds:
        """Return the seconds of a step."""
        work = [replace(one, count=count) for one, count in self.total(plan).work.items()]
        return seconds(work, self.gpu, 1, self.anchor.label)

    def corrected(self, plan: Plan, fit: Fit) -> Costs:
        """Return the costs with the error of ``plan``, which ``fit`` predicts whole."""
        off = fit.need_bytes - self.need(plan) + self.off
        host = fit.host_bytes or 0
        return dataclasses.replace(self, off=off, host_off=host - self.total(plan).host)


def _only(choice: int, count: int) -> tuple[int, ...]:
    return tuple(count if c == choice else 0 for c in range(len(CHOICES)))


def costs_of(row: Resolved, asking: Asking) -> Costs:
    """Trace the shallow models of a training, and return its costs.

    Raises:
        BadInput: no costs can be traced; says why.
    """
    groups = groups_of(row)
    few = {key: FEW if count else 0 for key, count in groups.items()}
    models = [few, *({**few, key: 2 * FEW} for key in groups)]
    asked = {(c, m): shallow(row, depths, edit_of(choice))
             for c, choice in enumerate(CHOICES) for m, depths in enumerate(models)}  # fmt: skip
    whole = changed(row, edit_of(CHOICES[RECOMPUTE]), 1)
    streams = _streams(row, few)
    rows = [whole, *asked.values(), *streams.values()]
    fits = iter(asking.fits([one for one in rows if one], "Costs of a block: "))
    anchor = next(fits) if whole else None
    if anchor is None or anchor.need_bytes is None:
        raise BadInput(f"--solve starts from checkpoint in each block: {_why(anchor, row)}")
    traced = {key: next(fits) for key, one in asked.items() if one}
    swapped = {count: next(fits) for count in streams}
    found = {key: measured(fit.prediction) for key, fit in traced.items() if fit.seconds}
    blocks, absent = [], set()
    for g in range(len(groups)):
        each = [_block(found, c, g) for c in range(len(CHOICES))]
        absent |= {(g, c) for c, one in enumerate(each) if one is None}
        if each[FFN] == each[KEEP]:  # the group has no FFN of its own
            absent.add((g, FFN))
        blocks.append(tuple(one or NOTHING for one in each))
    beside = tuple(_beside(found, c, blocks) for c in range(len(CHOICES)))
    return Costs(
        gpu=asking.asked.gpu,
        anchor=anchor,
        groups=tuple(groups.values()),
        blocks=tuple(blocks),
        beside=beside,
        swaps={0: NOTHING, **dict(_swaps(row, streams, swapped))},
        absent=frozenset(absent),
    )


def _why(anchor: Fit | None, row: Resolved) -> str:
    if anchor is None:
        return f"{row.recipe} does not take it"
    return anchor.lack or anchor.prediction.reason


def _beside(found: Mapping[Any, Measure], c: int, blocks: Sequence[Sequence[Measure]]) -> float:
    """Return what a choice holds at the peak beside what blocks keep."""
    return found[c, 0].beyond - sum(FEW * one[c].beyond for one in blocks) if (c, 0) in found else 0


def _block(found: Mapping[tuple[int, int], Measure], choice: int, group: int) -> Measure | None:
    """Return one block's costs; None if they were not traced."""
    pair = found.get((choice, 0)), found.get((choice, group + 1))
    if None in pair:
        return None
    base, deep = pair
    return NOTHING.plus(deep, 1 / FEW).plus(base, -1 / FEW)


# ---- streamed blocks ----


def _streams(row: Resolved, few: Mapping[str, int]) -> dict[int, Resolved]:
    """Return shallow rows with no streamed blocks and with two numbers of them, if they may stream
    whatever blocks keep."""
    counts = (0, AT_ONCE + 1, AT_ONCE + 2)
    deep = dict(few)
    deep[next(key for key in deep if deep[key])] += max(0, counts[-1] - sum(few.values()))
    if changed(row, edit_of(CHOICES[KEEP], f"block_swap:blocks={counts[1]}"), 1) is None:
        return {}
    swaps = {count: f"block_swap:blocks={count}" if count else "" for count in counts}
    found = {n: shallow(row, deep, edit_of(CHOICES[RECOMPUTE], text)) for n, text in swaps.items()}
    return found if all(found.values()) else {}


def _swaps(
    row: Resolved, streams: Mapping[int, Resolved], fits: Mapping[int, Fit]
) -> Iterator[tuple[int, Measure]]:
    """Yield each number of streamed blocks with what it adds, on a line in their elements."""
    if not streams or not all(fit.seconds for fit in fits.values()):
        return
    none, some, more = (measured(fit.prediction) for fit in fits.values())
    sizes = [elements(one, count) for count, one in streams.items()]
    each = NOTHING.plus(more, 1 / (sizes[2] - sizes[1])).plus(some, -1 / (sizes[2] - sizes[1]))
    start = some.plus(none, -1).plus(each, -sizes[1])
    for count in range(AT_ONCE + 1, row.subject.depth + 1):
        yield count, start.plus(each, elements(row, count))


def elements(row: Resolved, count: int) -> int:
    """Return the elements of ``count`` streamed blocks."""
    sizes: Sequence[int] = row.subject.block_parameters
    return sum(sizes[i] for i in spread(count, len(sizes))) if count else 0

"""Search for the largest size (micro batch, resolution and others) with which a card can train.
Memory grows almost linearly with the size, so a few predictions bracket the answer. The returned
size was predicted to fit. If the next larger size was not predicted, the answer has the bracket."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.planner import verdict
from harness.planner.edits import adapter, edited
from harness.planner.verdict import Fit
from harness.resolve import Resolved, resolve
from harness.system.cards import Card
from strategies.base import Slot
from strategies.streaming.block_swap import AT_ONCE

TRIES = 12
"""Most predictions per search; bisecting ``MOST`` sizes takes as many."""
MOST = 4096
LEAP = 16
"""Largest factor from a size that fits to the next try while no size is known to be too large.
Memory is not exactly linear, so small sizes say little about very large ones."""


# ---- sizes ----


class Ladder(NamedTuple):
    """Sizes to search, in ascending order: along them one number of a spec or recipe grows.
    ``words``: their name in a heading. ``weights``: about proportional to the memory that each size
    adds. ``fields``: returns the fields of the spec at the size with an index. ``named``: returns a
    row's size in words. ``start``: index of the first try."""

    words: str
    weights: Sequence[float]
    fields: Callable[[int], Mapping[str, Any]]
    named: Callable[[Resolved], str]
    start: int


def sample_name(resolved: Resolved) -> str:
    """Return the sample size of a row, such as ``480x832 of 81 frames``."""
    return resolved.subject.size_in_words.partition(",")[0]


def _swapping(row: Resolved, count: int) -> str:
    """Return the recipe with ``count`` swapped blocks; with 0, without the block-swap strategy."""
    return edited(row, {Slot.SWAP: f"block_swap:blocks={count}" if count else ""})


SOUGHT = ("batch", "resolution", "frames", "rank", "resident")
"""Values of ``--largest``."""


def ladder(what: str, row: Resolved) -> Ladder:
    """Return the sizes of ``row`` to choose among; ``what``: a value of ``SOUGHT``."""
    numbers, depth, part = range(1, MOST + 1), row.subject.depth, adapter(row)
    if what == "batch":  # at the same processes and accumulation
        ranks = row.launch.layout.data * row.recipe.accumulation
        own = row.micro_batch - 1
        return Ladder("micro batch", numbers, lambda at: {"global_batch": numbers[at] * ranks},
                      lambda one: f"micro batch {one.micro_batch}", own)  # fmt: skip
    if what == "rank":

        def ranked(at: int) -> Mapping[str, str]:
            changed = dataclasses.replace(part, rank=numbers[at])
            return {"recipe": edited(row, {Slot.ADAPT: str(changed)})}

        return Ladder("rank", numbers, ranked, lambda one: f"rank {adapter(one).rank}",
                      min(part.rank, MOST) - 1)  # fmt: skip
    if what == "resident":
        counts = [*range(depth, AT_ONCE, -1), 0]
        # AT_ONCE of the swapped blocks are on the device at a time.
        weights = [float(depth - count + AT_ONCE if count else depth) for count in counts]

        def swapped(one: Resolved) -> int:
            return getattr(one.recipe.in_slot(Slot.SWAP), "blocks", 0)

        def named(one: Resolved) -> str:
            return f"{swapped(one)} blocks swapped, {depth - swapped(one)} of {depth} stay"

        return Ladder("number of blocks that stay on the GPU", weights,
                      lambda at: {"recipe": _swapping(row, counts[at])}, named,
                      counts.index(swapped(row)))  # fmt: skip
    sizes = row.subject.samples_up(what)
    weights = [times for _, times in sizes]  # of the row's own tokens
    words = "number of frames" if what == "frames" else what
    return Ladder(words, weights, lambda at: sizes[at][0], sample_name, bisect_left(weights, 1.0))


def unable(what: str, resolved: Resolved) -> str:
    """Return why this row's largest ``what`` cannot be searched, with a hint; empty if it can."""
    recipe, model = resolved.recipe, resolved.spec.model
    if what == "rank" and adapter(resolved) is None:
        return (
            f"{recipe} has no adapters, so it has no rank; add lora:rank=16, or give another "
            "--largest"
        )
    if what == "resident":
        recipe = _swapping(resolved, AT_ONCE + 1)
        refusal = resolve(dataclasses.replace(resolved.spec, recipe=recipe)).refusal
        return f"no block of {resolved.recipe} can be swapped: {refusal}" if refusal else ""
    if what in ("resolution", "frames") and not resolved.subject.samples_up(what):
        return f"model {model} takes one number of {what} only; give --largest batch"
    return ""


# ---- search ----


@dataclass
class Largest:
    """Search for one recipe along ``sizes``: the bracket, as indices of the largest size that fits
    and the next that does not; ``known`` predictions by index, in the order in which they were
    made; ``stopped``: why the search stopped early or did not start."""

    row: Resolved
    sizes: Ladder
    stopped: str
    low: int = -1
    known: dict[int, Fit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.high = len(self.sizes.weights)

    @property
    def recipe(self) -> str:
        return str(self.row.recipe)

    def at(self, index: int) -> Resolved:
        """Return the row at a size."""
        return resolve(dataclasses.replace(self.row.spec, **self.sizes.fields(index)))

    @property
    def fits(self) -> Fit | None:
        """The largest size predicted to fit; None if the smallest does not."""
        return self.known.get(self.low)

    @property
    def over(self) -> Fit | None:
        """The smallest size predicted not to fit; None if the last of the ladder fits."""
        return self.known.get(self.high)

    @property
    def exact(self) -> bool:
        """True if no size lies between them."""
        return self.high - self.low == 1

    @property
    def tried(self) -> int:
        """Number of predictions."""
        return len(self.known)

    @property
    def open(self) -> bool:
        return not self.exact and not self.stopped and self.tried < TRIES

    @property
    def next(self) -> int:
        """Index of the next size to predict. The row's own is the first, and the smallest size
        follows if that is too large. Then the line through two known sizes is followed to the
        card's memory, but half of the bracket is taken after two tries on one side of the answer:
        allocator blocks make memory grow in steps, which a line approaches from one side only."""
        if self.low < 0:
            return 0 if self.known else self.sizes.start
        weights, closed = self.sizes.weights, self.high < len(self.sizes.weights)
        last = [fit.fits for fit in self.known.values()][-2:]
        fitting = sorted(at for at, fit in self.known.items() if fit.fits)
        if closed and len(set(last)) == 1 < len(last):
            guess = (self.low + self.high) // 2
        elif closed:
            guess = self._crossing(self.low, self.high)
        elif len(fitting) > 1:
            guess = self._crossing(*fitting[-2:])
        else:
            guess = bisect_right(weights, 4 * weights[self.low])
        if not closed:
            guess = min(guess, bisect_right(weights, LEAP * weights[self.low]) - 1)
        return max(min(guess, self.high - 1), self.low + 1)

    def _crossing(self, first: int, second: int) -> int:
        """Return where the line through two sizes reaches the memory of the card or the host."""
        one, two, weights = self.known[first], self.known[second], self.sizes.weights
        step = weights[second] - weights[first]
        ends = [(one.most_bytes, two.most_bytes, one.gpu.memory_bytes)]
        if one.host_bytes and two.host_bytes:
            ends.append((one.host_most, two.host_most, one.host_memory))
        near = min((have - low) / max(1, high - low) for low, high, have in ends)
        return bisect_right(weights, weights[first] + near * step) - 1

    def take(self, index: int, fit: Fit) -> None:
        """Add a prediction."""
        if fit.verdict == "unknown":
            self.stopped = (
                f"{self.sizes.named(fit.resolved)} could not be predicted: {fit.prediction.reason}"
            )
            return
        self.known[index] = fit
        if self.low < index < self.high:
            self.low, self.high = (index, self.high) if fit.fits else (self.low, index)


def search(
    rows: Sequence[Resolved],
    what: str,
    gpu: Card,
    ask: Callable[[list[Resolved]], list[Fit]],
    told: Iterable[Fit] = (),
) -> list[Largest]:
    """Return the largest ``what`` (a value of ``SOUGHT``) of each row; ``ask`` predicts rows.
    Each round asks for one size of every row whose bracket is open. Streamed blocks that a lattice
    has predicted (``told``) begin the bracket."""
    found = [Largest(row, ladder(what, row), verdict.lack_of(row, gpu)) for row in rows]
    known = {fit.resolved.spec: fit for fit in told if what == "resident" and fit.need_bytes}
    for one in found if known else ():
        for at in range(len(one.sizes.weights)):
            if fit := known.get(one.at(at).spec):
                one.take(at, fit)
    while active := [one for one in found if one.open]:
        guesses = [one.next for one in active]
        asked = [one.at(at) for one, at in zip(active, guesses, strict=True)]
        for one, at, fit in zip(active, guesses, ask(asked), strict=True):
            one.take(at, fit)
    return found

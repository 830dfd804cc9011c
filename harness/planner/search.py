"""Search for the largest size (micro batch, resolution and others) with which a card can train.
Memory grows almost linearly with the size, so a few predictions bracket the answer. The returned
size was predicted to fit. If the next larger size was not predicted, the answer has the bracket."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from harness.planner import verdict
from harness.planner.edits import adapter, edited
from harness.planner.verdict import Fit
from harness.resolve import Resolved, resolve
from harness.system.cards import Card
from strategies.base import BadInput, Slot
from strategies.streaming.block_swap import AT_ONCE

TRIES = 12
"""Most predictions per search; bisecting ``MOST`` sizes takes as many."""
MOST = 4096
NARROW = 64
"""Width of a bracket that the later half of the tries bisects. Allocator blocks make memory grow in
steps, so a line through two sizes does not locate the step."""
LEAP = 16
"""Largest factor from a size that fits to the next try while no size is known to be too large.
Memory is not exactly linear, so small sizes say little about very large ones."""


@dataclass
class Largest:
    """Search for one recipe: the bracket, as indices of the largest size that fits and the next
    that does not; ``known`` predictions by index, of at most ``most``; ``stopped``: why the search
    stopped early or did not start."""

    recipe: str
    low: int
    high: int
    most: int
    known: dict[int, Fit]
    stopped: str

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
        return self.high - self.low > 1 and not self.stopped and self.tried < self.most


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Sizes to search, in ascending order: along them one number of a spec or recipe grows.
    ``words``: their name in a heading. ``weights``: about proportional to the memory that each size
    adds. ``at``: returns a row at the size with an index. ``named``: returns a row's size in words.
    ``start``: index of the first try. ``place``: returns the index of a row's size, or -1."""

    words: str
    weights: Sequence[float]
    at: Callable[[Resolved, int], Resolved]
    named: Callable[[Resolved], str]
    place: Callable[[Resolved], int]
    start: int = 0


def batches(_asked: Sequence[Resolved]) -> Ladder:
    """Return the ladder of micro batches, at the same processes and accumulation."""

    def at(resolved: Resolved, index: int) -> Resolved:
        whole = (index + 1) * resolved.launch.layout.data * resolved.recipe.accumulation
        return resolve(dataclasses.replace(resolved.spec, global_batch=whole))

    return Ladder(words="micro batch", weights=range(1, MOST + 1), at=at,
                  named=lambda row: f"micro batch {row.micro_batch}",
                  place=lambda row: row.micro_batch - 1)  # fmt: skip


def samples(axis: str, asked: Sequence[Resolved]) -> Ladder:
    """Return the ladder of "resolution" or "frames" (``axis``)."""
    sizes = asked[0].subject.samples_up(axis)
    weights = [times for _, times in sizes]

    def at(resolved: Resolved, index: int) -> Resolved:
        return resolve(dataclasses.replace(resolved.spec, **sizes[index][0]))

    def place(resolved: Resolved) -> int:
        given = vars(resolved.spec).items()
        return next((i for i, (fields, _) in enumerate(sizes) if fields.items() <= given), -1)

    words, start = "number of frames" if axis == "frames" else axis, bisect_left(weights, 1.0)
    return Ladder(words=words, weights=weights, at=at, named=sample_name, start=start, place=place)


def sample_name(resolved: Resolved) -> str:
    """Return the sample size of a row, such as ``480x832 of 81 frames``."""
    return resolved.subject.size_in_words.partition(",")[0]


def ranks(asked: Sequence[Resolved]) -> Ladder:
    """Return the ladder of adapter ranks; it starts at the first rank of the requested rows."""

    def at(row: Resolved, index: int) -> Resolved:
        part = dataclasses.replace(adapter(row), rank=index + 1)
        recipe = edited(row, {Slot.ADAPT: str(part)})
        return resolve(dataclasses.replace(row.spec, recipe=recipe))

    def place(row: Resolved) -> int:
        part = adapter(row)
        return part.rank - 1 if part else -1

    start = next((i for i in map(place, asked) if 0 <= i < MOST), 0)
    return Ladder(words="rank", weights=range(1, MOST + 1), at=at,
                  named=lambda row: f"rank {adapter(row).rank}", place=place,
                  start=start)  # fmt: skip


def residents(asked: Sequence[Resolved]) -> Ladder:
    """Return the ladder of block counts that stay on the device while other blocks are swapped."""
    depth = asked[0].subject.depth
    swapped = [*range(depth, AT_ONCE, -1), 0]
    # AT_ONCE of the swapped blocks are on the device at a time.
    weights = [float(depth - count + AT_ONCE if count else depth) for count in swapped]

    def place(row: Resolved) -> int:
        part = row.recipe.in_slot(Slot.SWAP)
        return swapped.index(part.blocks if part else 0)

    return Ladder(words="number of blocks that stay on the GPU", weights=weights,
                  at=lambda row, index: _swapping(row, swapped[index]), named=resident_name,
                  place=place, start=len(swapped) - 1)  # fmt: skip


def _swapping(resolved: Resolved, count: int) -> Resolved:
    """Return the row with ``count`` swapped blocks; with 0, without the block-swap strategy."""
    recipe = edited(resolved, {Slot.SWAP: f"block_swap:blocks={count}" if count else ""})
    return resolve(dataclasses.replace(resolved.spec, recipe=recipe))


def resident_name(resolved: Resolved) -> str:
    """Return the size of a row of ``residents``, such as ``12 blocks swapped, 45 of 57 stay``."""
    part, depth = resolved.recipe.in_slot(Slot.SWAP), resolved.subject.depth
    count = getattr(part, "blocks", 0)
    return f"{count} blocks swapped, {depth - count} of {depth} stay"


def unable(what: str, resolved: Resolved) -> str:
    """Return why this row's largest ``what`` cannot be searched, with a hint; empty if it can."""
    recipe, model = resolved.recipe, resolved.spec.model
    if what == "rank" and adapter(resolved) is None:
        return (
            f"{recipe} has no adapters, so it has no rank; add lora:rank=16, or give another "
            "--largest"
        )
    if what == "resident":
        refusal = _swapping(resolved, AT_ONCE + 1).refusal
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


SOUGHT: dict[str, Callable[[Sequence[Resolved]], Ladder]] = {
    "batch": batches,
    "resolution": partial(samples, "resolution"),
    "frames": partial(samples, "frames"),
    "rank": ranks,
    "resident": residents,
}
"""Value of ``--largest`` -> function that returns the sizes to choose among, for requested rows."""


def search(
    asked: Sequence[Resolved],
    sizes: Ladder,
    gpu: Card,
    ask: Callable[[list[Resolved]], list[Fit]],
    told: Sequence[Fit] = (),
) -> list[Largest]:
    """Return the largest of ``sizes`` for each requested row.
    Each round asks for one size of every row whose bracket is open; ``ask`` predicts rows. A row
    has at most ``TRIES`` predictions. Fits in ``told`` that are sizes of the ladder start the
    bracket, so that the answer agrees with them."""
    found = []
    for row in asked:
        known = {}  # predicted before: they do not count as tries
        for fit in told:
            index = sizes.place(fit.resolved) if fit.need_bytes is not None else -1
            if 0 <= index < len(sizes.weights) and sizes.at(row, index).spec == fit.resolved.spec:
                known[index] = fit
        low = max((i for i, fit in known.items() if fit.fits), default=-1)
        high = min((i for i in known if i > low), default=len(sizes.weights))
        most, lack = TRIES + len(known), verdict.lack_of(row, gpu)
        found.append(Largest(str(row.recipe), low, high, most, known, lack))
    while active := [(row, one) for row, one in zip(asked, found, strict=True) if one.open]:
        guesses = [_next(one, sizes.weights, sizes.start) for _, one in active]
        rows = [sizes.at(row, at) for (row, _), at in zip(active, guesses, strict=True)]
        for (_, state), index, fit in zip(active, guesses, ask(rows), strict=True):
            if fit.verdict == "unknown":
                size = sizes.named(fit.resolved)
                state.stopped = f"{size} could not be predicted: {fit.prediction.reason}"
                continue
            state.known[index] = fit
            if fit.fits:
                state.low = index
            else:
                state.high = index
    return found


def _next(state: Largest, weights: Sequence[float], start: int) -> int:
    """Return the index of the next size to predict.
    The line through two known sizes is followed to the card's memory. It needs two points:
    ``start`` is tried first, and the smallest size if that is too large. Repeated tries on one side
    of the answer step further beyond the line, to find the other side. Once both sides are known,
    they bisect."""
    if state.low < 0:
        return 0 if state.known else start
    fitting = [index for index, fit in state.known.items() if fit.fits]
    ends = [state.low, state.high if state.high < len(weights) else max(fitting[:-1], default=-1)]
    if ends[1] < 0:
        guess = bisect_right(weights, 4 * weights[state.low])
    else:
        guess = _crossing(state, weights, min(ends), max(ends))
        last = [fit.fits for fit in reversed(state.known.values())]
        # How many of the last tries ended on the same side.
        streak = next((i for i, fits in enumerate(last) if fits != last[0]), len(last))
        narrow = state.high - state.low <= NARROW and len(state.known) > TRIES // 2
        if (streak > 2 or narrow) and state.high < len(weights):
            guess = (state.low + state.high) // 2  # a line approaches from one side only
        else:
            guess += (2 ** (streak - 1) - 1) * (1 if last[0] else -1)
    known = state.high < len(weights)
    farthest = state.high if known else bisect_right(weights, LEAP * weights[state.low]) - 1
    guess = min(guess, max(farthest, state.low + 1), state.high - 1)
    return max(guess, state.low + 1)


def _crossing(state: Largest, weights: Sequence[float], first: int, second: int) -> int:
    """Return where the line through two sizes reaches the memory of the card or the host."""
    one, two = state.known[first], state.known[second]
    step = weights[second] - weights[first]
    ends = [(one.most_bytes, two.most_bytes, one.gpu.memory_bytes)]
    if one.host_bytes and two.host_bytes:
        ends.append((one.host_most, two.host_most, one.host_memory))
    near = min((have - low) / max(1, high - low) for low, high, have in ends)
    return bisect_right(weights, weights[first] + near * step) - 1

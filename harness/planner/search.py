"""Search for the largest size (micro batch, model and others) with which a card can train.

Memory grows almost linearly with the size, so a few predictions bracket the answer. The returned
size was predicted to fit. If the next larger size was not predicted, the answer has the bracket.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from harness.planner import verdict
from harness.planner.verdict import Fit
from harness.resolve import Resolved, resolve
from harness.system.cards import Card
from strategies.base import BadInput

TRIES = 12
"""Most predictions per search; bisecting ``MOST`` sizes takes as many."""
MOST = 4096
NARROW = 64
"""Width of a bracket that the later half of the tries bisects. Allocator blocks make memory grow in
steps, so a line through two sizes does not locate the step."""
LEAP = 16
"""Largest factor from a size that fits to the next try while no size is known to be too large.
Memory is not exactly linear, so small sizes say little about very large ones."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """Result of a search for one recipe.

    ``fits``: the largest size predicted to fit; None if the smallest does not. ``over``: the
    smallest size predicted not to fit; None if the last of the ladder fits. ``exact``: no size lies
    between them. ``stopped``: why the search stopped early or did not start. ``tried``: number of
    predictions.
    """

    recipe: str
    fits: Fit | None
    over: Fit | None
    exact: bool
    stopped: str
    tried: int


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Sizes to search, in ascending order.

    ``weights``: about proportional to the memory that each size adds. ``at``: returns a row at the
    size with an index. ``named``: returns a row's size in words. ``start``: index of the first try.
    ``place``: returns the index of a row's size, or -1.
    """

    weights: Sequence[float]
    at: Callable[[Resolved, int], Resolved]
    named: Callable[[Resolved], str]
    start: int = 0
    place: Callable[[Resolved], int] = lambda _row: -1


def batches(_asked: Sequence[Resolved]) -> Ladder:
    """Return the ladder of micro batches, at the same processes and accumulation."""

    def at(resolved: Resolved, index: int) -> Resolved:
        spec = resolved.spec
        whole = (index + 1) * resolved.launch.layout.data * resolved.recipe.accumulation
        return resolve(dataclasses.replace(spec, global_batch=whole))

    return Ladder(
        weights=range(1, MOST + 1),
        at=at,
        named=batch_name,
        place=lambda row: row.micro_batch - 1,
    )


def batch_name(resolved: Resolved) -> str:
    """Return the size of a row of ``batches``, such as ``micro batch 8``."""
    return f"micro batch {resolved.micro_batch}"


def models(asked: Sequence[Resolved]) -> Ladder:
    """Return the ladder of models that differ from the requested one only in size.

    The batch stays the same.

    Raises:
        BadInput: the model has only one size.
    """
    sizes = asked[0].subject.sizes_up()
    if not sizes:
        model = asked[0].spec.model
        raise BadInput(f"model {model} comes in one size; take --largest batch, or a DiT")

    def at(resolved: Resolved, index: int) -> Resolved:
        return resolve(dataclasses.replace(resolved.spec, model=sizes[index][0]))

    weights = [float(parameters) for _, parameters in sizes]
    names = [name for name, _ in sizes]

    def place(row: Resolved) -> int:
        return names.index(row.spec.model) if row.spec.model in names else -1

    return Ladder(weights=weights, at=at, named=model_name, place=place)


def model_name(resolved: Resolved) -> str:
    """Return the size of a row of ``models``, with its millions of parameters."""
    subject = resolved.subject
    size, count = subject.dimensions, subject.sizes.total / 1e6
    return f"depth {size.depth}, width {size.width} ({count:.0f} M)"


@dataclass
class _State:
    """Bracket of a recipe: indices of the largest size that fits and the next that does not."""

    low: int
    high: int
    tries: int
    known: dict[int, Fit] = field(default_factory=dict)
    stopped: str = ""

    def begin(self, known: dict[int, Fit]) -> None:
        """Start from sizes that were predicted before; they do not count as tries."""
        self.known, self.tries = known, self.tries + len(known)
        self.low = max((i for i, fit in known.items() if fit.fits), default=self.low)
        self.high = min((i for i in known if i > self.low), default=self.high)

    @property
    def open(self) -> bool:
        return self.high - self.low > 1 and not self.stopped and len(self.known) < self.tries


def search(
    asked: Sequence[Resolved],
    sizes: Ladder,
    gpu: Card,
    ask: Callable[[list[Resolved]], list[Fit]],
    tries: int = 0,
    told: Sequence[Fit] = (),
) -> list[Largest]:
    """Return the largest of ``sizes`` for each requested row.

    Each round asks for one size of every row whose bracket is open; ``ask`` predicts rows. A row
    has at most ``tries`` predictions (0: ``TRIES``). Fits in ``told`` that are sizes of the ladder
    start the bracket, so that the answer agrees with them.
    """
    top = len(sizes.weights)
    most = tries or TRIES
    states = [_State(-1, top, most, stopped=verdict.lack_of(row, gpu)) for row in asked]
    for row, state in zip(asked, states, strict=True):
        state.begin(dict(_on(sizes, row, told)))
    while any(state.open for state in states):
        active = [i for i, state in enumerate(states) if state.open]
        guesses = [_next(states[i], sizes.weights, sizes.start) for i in active]
        rows = [sizes.at(asked[i], index) for i, index in zip(active, guesses, strict=True)]
        for i, index, fit in zip(active, guesses, ask(rows), strict=True):
            _narrow(states[i], index, fit, sizes.named(fit.resolved))
    return [_answer(*pair) for pair in zip(asked, states, strict=True)]


def _on(sizes: Ladder, row: Resolved, told: Sequence[Fit]) -> Iterator[tuple[int, Fit]]:
    """Yield (index, fit) of each fit that is a size of ``row``'s ladder."""
    for fit in told:
        index = sizes.place(fit.resolved) if fit.need_bytes is not None else -1
        if 0 <= index < len(sizes.weights) and sizes.at(row, index).spec == fit.resolved.spec:
            yield index, fit


def _answer(resolved: Resolved, state: _State) -> Largest:
    return Largest(
        recipe=str(resolved.recipe),
        fits=state.known.get(state.low),
        over=state.known.get(state.high),
        exact=state.high - state.low == 1,
        stopped=state.stopped,
        tried=len(state.known),
    )


def _next(state: _State, weights: Sequence[float], start: int) -> int:
    """Return the index of the next size to predict.

    The line through two known sizes is followed to the card's memory. It needs two points:
    ``start`` is tried first, and the smallest size if that is too large. Repeated tries on one side
    of the answer step further beyond the line, to find the other side. Once both sides are known,
    they bisect.
    """
    if state.low < 0:
        return 0 if state.known else start
    fitting = [index for index, fit in state.known.items() if fit.fits]
    ends = [state.low, state.high if state.high < len(weights) else max(fitting[:-1], default=-1)]
    if ends[1] < 0:
        guess = bisect_right(weights, 4 * weights[state.low])
    else:
        guess = _crossing(state, weights, min(ends), max(ends))
        streak, fits = _streak(list(state.known.values()))
        narrow = state.high - state.low <= NARROW and len(state.known) > TRIES // 2
        if (streak > 2 or narrow) and state.high < len(weights):
            guess = (state.low + state.high) // 2  # a line approaches from one side only
        else:
            guess += (2 ** (streak - 1) - 1) * (1 if fits else -1)
    known = state.high < len(weights)
    farthest = state.high if known else bisect_right(weights, LEAP * weights[state.low]) - 1
    guess = min(guess, max(farthest, state.low + 1), state.high - 1)
    return max(guess, state.low + 1)


def _crossing(state: _State, weights: Sequence[float], first: int, second: int) -> int:
    """Return where the line through two sizes reaches the memory of the card or the host."""
    one, two = state.known[first], state.known[second]
    step = weights[second] - weights[first]
    ends = [(one.most_bytes, two.most_bytes, one.gpu.memory_bytes)]
    if one.host_bytes and two.host_bytes:
        ends.append((one.host_most, two.host_most, one.host_memory))
    near = min((have - low) / max(1, high - low) for low, high, have in ends)
    return bisect_right(weights, weights[first] + near * step) - 1


def _streak(known: Sequence[Fit]) -> tuple[int, bool]:
    """Return how many of the last tries ended on the same side, and whether they fitted."""
    ends = [fit.fits for fit in reversed(known)]
    return next((i for i, end in enumerate(ends) if end != ends[0]), len(ends)), ends[0]


def _narrow(state: _State, index: int, fit: Fit, name: str) -> None:
    if fit.verdict == "unknown":
        state.stopped = f"{name} could not be predicted: {fit.prediction.reason}"
        return
    state.known[index] = fit
    if fit.fits:
        state.low = index
    else:
        state.high = index

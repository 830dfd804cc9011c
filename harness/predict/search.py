"""The inverse of a plan: the largest micro batch, or the largest DiT, that a card can train.

Memory grows almost in a straight line with the samples, and with a model's parameters: a few
predictions bracket the answer. The one that is named was predicted to fit; where the next larger
size was not predicted too, the answer says so and names the bracket.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import presets
from harness.predict import attention, fit, pool
from harness.predict.fit import Fit
from harness.predict.gpus import Gpu
from harness.resolve import Resolved, resolve

__all__ = ["Largest", "ladder", "largest_batch", "largest_model"]

TRIES = 10
MOST = 4096
HEAD = 72
"""Width of a head of the models searched, as DiT-XL's."""
LEAP = 16
"""How many times larger than what is known to fit a next try may be: lines bend."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """A recipe's answer. ``fits`` is the largest size predicted to fit (None: not even the
    smallest), ``over`` the smallest that was not (None: the last of the ladder fits).

    ``exact``: no size lies between the two. ``stopped``: why the search could not go on,
    or not begin.
    """

    recipe: str
    fits: Fit | None
    over: Fit | None
    exact: bool
    stopped: str
    tried: int


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Sizes to choose among, growing. ``weights``: about proportional to the memory they add."""

    weights: Sequence[float]
    at: Callable[[Resolved, int], Resolved]
    named: Callable[[Resolved], str]


def largest_batch(
    asked: Sequence[Resolved], gpu: Gpu, folder: Path, jobs: int, progress: Any
) -> list[Largest]:
    """The largest micro batch of each recipe, at the same processes and accumulation."""

    def at(resolved: Resolved, index: int) -> Resolved:
        spec = resolved.spec
        whole = (index + 1) * spec.processes * resolved.recipe.accumulation
        return resolve(dataclasses.replace(spec, global_batch=whole))

    batches = Ladder(weights=range(1, MOST + 1), at=at, named=batch_name)
    return _search(asked, batches, gpu, folder, jobs, progress)


def batch_name(resolved: Resolved) -> str:
    """The size of a row of ``largest_batch``."""
    return f"micro batch {resolved.micro_batch}"


def ladder(patch: int = 2) -> list[presets.Shape]:
    """DiTs of growing depth and width, in the proportions of DiT-XL (28 deep, 1152 wide)."""
    found = []
    for heads in range(2, 129):
        width = heads * HEAD
        depth = max(2, round(28 * width / 1152))
        if width % 4 == 0:
            found.append(presets.Shape(depth, width, heads, patch))
    return found


def largest_model(
    asked: Sequence[Resolved], gpu: Gpu, folder: Path, jobs: int, progress: Any
) -> list[Largest]:
    """The largest DiT of each recipe, depth and width scaled together, at the same batch."""
    shapes = ladder(asked[0].shape.patch_size)

    def at(resolved: Resolved, index: int) -> Resolved:
        shape = shapes[index]
        sizes = f"depth={shape.depth},hidden={shape.hidden_size},heads={shape.num_heads}"
        model = f"DiT-XL/2:{sizes},patch={shape.patch_size}"
        return resolve(dataclasses.replace(resolved.spec, model=model))

    weights = [float(presets.trainable_count(shape)) for shape in shapes]
    models = Ladder(weights=weights, at=at, named=model_name)
    return _search(asked, models, gpu, folder, jobs, progress)


def model_name(resolved: Resolved) -> str:
    """The size of a row of ``largest_model``, with its millions of parameters."""
    shape = resolved.shape
    count = presets.trainable_count(shape) / 1e6
    return f"depth {shape.depth}, width {shape.hidden_size} ({count:.0f} M)"


@dataclass
class _State:
    """One recipe's bracket: indices of the largest that fits and the smallest that does not."""

    low: int
    high: int
    known: dict[int, Fit] = field(default_factory=dict)
    stopped: str = ""

    @property
    def open(self) -> bool:
        return self.high - self.low > 1 and not self.stopped and len(self.known) < TRIES


def _search(
    asked: Sequence[Resolved], sizes: Ladder, gpu: Gpu, folder: Path, jobs: int, progress: Any
) -> list[Largest]:
    """Rounds of one prediction for each recipe whose bracket is open."""
    top = len(sizes.weights)
    states = [_State(-1, top, stopped=fit.lack_of(one, gpu)) for one in asked]
    kind = attention.preferred(gpu.capability)
    while any(state.open for state in states):
        active = [i for i, state in enumerate(states) if state.open]
        tries = [_next(states[i], sizes.weights) for i in active]
        rows = [sizes.at(asked[i], index) for i, index in zip(active, tries, strict=True)]
        progress.begin([f"{row.recipe} at {sizes.named(row)}" for row in rows], jobs)
        found = pool.predict_all(rows, folder, kind=kind, jobs=jobs, done=progress.done)
        progress.end()
        for i, index, row, prediction in zip(active, tries, rows, found, strict=True):
            _narrow(states[i], index, fit.judge(row, prediction, gpu), sizes.named(row))
    return [_answer(*pair) for pair in zip(asked, states, strict=True)]


def _answer(resolved: Resolved, state: _State) -> Largest:
    return Largest(
        recipe=str(resolved.recipe),
        fits=state.known.get(state.low),
        over=state.known.get(state.high),
        exact=state.high - state.low == 1,
        stopped=state.stopped,
        tried=len(state.known),
    )


def _next(state: _State, weights: Sequence[float]) -> int:
    """Where to look: where the line through what is known meets the card's memory.

    The smallest size first, for the line needs a beginning. Tries that keep ending on one side
    (the line bends) step ever further beyond it, so that the other side is found too.
    """
    if state.low < 0:
        return 0
    fitting = [index for index, found in state.known.items() if found.verdict == "fits"]
    ends = [state.low, state.high if state.high < len(weights) else max(fitting[:-1], default=-1)]
    if ends[1] < 0:
        guess = 4 * (state.low + 1)
    else:
        guess = _crossing(state, weights, min(ends), max(ends))
        guess += _push(list(state.known.values()))
    farthest = bisect_right(weights, LEAP * weights[state.low]) - 1
    guess = min(guess, max(farthest, state.low + 1), state.high - 1)
    return max(guess, state.low + 1)


def _crossing(state: _State, weights: Sequence[float], first: int, second: int) -> int:
    """The index at which the line through two known sizes reaches the end of the card."""
    one, two = state.known[first], state.known[second]
    slope = max(1, two.need_bytes - one.need_bytes) / (weights[second] - weights[first])
    return bisect_right(weights, weights[first] + one.margin_bytes / slope) - 1


def _push(known: Sequence[Fit]) -> int:
    """Indices to step beyond the line after so many tries on one side: 0, 1, 3, 7 ..."""
    ends = [found.verdict == "fits" for found in reversed(known)]
    streak = next((i for i, end in enumerate(ends) if end != ends[0]), len(ends))
    return (2 ** (streak - 1) - 1) * (1 if ends[0] else -1)


def _narrow(state: _State, index: int, found: Fit, name: str) -> None:
    if found.verdict == "unknown":
        state.stopped = f"{name} could not be predicted: {found.prediction.reason}"
        return
    state.known[index] = found
    if found.verdict == "fits":
        state.low = index
    else:
        state.high = index

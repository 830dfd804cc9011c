"""The inverse of a plan: the largest micro batch, or the largest DiT, that a card can train.

Memory grows steadily with both, so a few predictions bracket the answer; the one that is named
was predicted to fit, and the next larger one that was tried was not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import presets
from harness.predict import fit, pool
from harness.predict.fit import Fit
from harness.predict.gpus import Gpu
from harness.resolve import Resolved, resolve

__all__ = ["Largest", "ladder", "largest_batch", "largest_model"]

TRIES = 8
MOST = 4096
HEAD = 72
"""Width of a head of the models searched, as DiT-XL's."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """A recipe's answer: the size that fits (None: not even the smallest), and its prediction."""

    recipe: str
    size: str | None
    fit: Fit | None
    too_large: str | None
    tried: int


def largest_batch(
    asked: Sequence[Resolved], gpu: Gpu, folder: Path, jobs: int, progress: Any
) -> list[Largest]:
    """The largest micro batch of each recipe, at the same processes and accumulation."""

    def at(resolved: Resolved, size: int) -> Resolved:
        spec = resolved.spec
        whole = size * spec.processes * resolved.recipe.accumulation
        return resolve(dataclasses.replace(spec, global_batch=whole))

    sizes = list(range(1, MOST + 1))
    return _search(
        asked, sizes, at, lambda size: f"micro batch {size}", gpu, folder, jobs, progress
    )


def ladder() -> list[presets.Shape]:
    """DiTs of growing depth and width, in the proportions of DiT-XL (28 deep, 1152 wide)."""
    found = []
    for heads in range(2, 129):
        width = heads * HEAD
        depth = max(2, round(28 * width / 1152))
        if width % 4 == 0:
            found.append(presets.Shape(depth, width, heads, 2))
    return found


def largest_model(
    asked: Sequence[Resolved], gpu: Gpu, folder: Path, jobs: int, progress: Any
) -> list[Largest]:
    """The largest DiT of each recipe, depth and width scaled together, at the same batch."""

    def at(resolved: Resolved, shape: presets.Shape) -> Resolved:
        patch = resolved.shape.patch_size
        sizes = f"depth={shape.depth},hidden={shape.hidden_size},heads={shape.num_heads}"
        model = f"DiT-XL/2:{sizes},patch={patch}"
        return resolve(dataclasses.replace(resolved.spec, model=model))

    def named(shape: presets.Shape) -> str:
        count = presets.trainable_count(shape) / 1e6
        return f"depth {shape.depth}, width {shape.hidden_size} ({count:.0f} M parameters)"

    return _search(asked, ladder(), at, named, gpu, folder, jobs, progress)


@dataclass
class _State:
    """One recipe's bracket: indices of the largest that fits and the smallest that does not."""

    low: int
    high: int
    best: Fit | None = None
    worst: Fit | None = None
    tried: int = 0

    @property
    def open(self) -> bool:
        return self.high - self.low > 1 and self.tried < TRIES


def _search(
    asked: Sequence[Resolved],
    sizes: Sequence[Any],
    at: Callable[[Resolved, Any], Resolved],
    named: Callable[[Any], str],
    gpu: Gpu,
    folder: Path,
    jobs: int,
    progress: Any,
) -> list[Largest]:
    """Rounds of one prediction for each recipe whose bracket is open."""
    states = [_State(-1, len(sizes)) for _ in asked]
    while any(state.open for state in states):
        active = [i for i, state in enumerate(states) if state.open]
        middles = [_next(states[i], len(sizes)) for i in active]
        rows = [at(asked[i], sizes[m]) for i, m in zip(active, middles, strict=True)]
        progress.begin(
            [f"{r.recipe} at {named(sizes[m])}" for r, m in zip(rows, middles, strict=True)], jobs
        )
        found = pool.predict_all(rows, folder, jobs=jobs, done=progress.done)
        progress.end()
        for i, middle, row, prediction in zip(active, middles, rows, found, strict=True):
            _narrow(states[i], middle, fit.judge(row, prediction, gpu))
    return [
        Largest(
            recipe=str(resolved.recipe),
            size=named(sizes[state.low]) if state.low >= 0 else None,
            fit=state.best,
            too_large=named(sizes[state.high]) if state.high < len(sizes) else None,
            tried=state.tried,
        )
        for resolved, state in zip(asked, states, strict=True)
    ]


def _next(state: _State, count: int) -> int:
    """Where to look: on the straight line through what is known, else by doubling."""
    if state.best is None:
        return 0 if state.worst is None or state.high <= 1 else min(state.high - 1, state.high // 4)
    if state.worst is None:
        return min(count - 1, 4 * (state.low + 1))
    room = state.best.margin_bytes / max(1, state.worst.need_bytes - state.best.need_bytes)
    guess = state.low + int(room * (state.high - state.low))
    return min(max(guess, state.low + 1), state.high - 1)


def _narrow(state: _State, middle: int, found: Fit) -> None:
    state.tried += 1
    if found.verdict == "unknown":
        state.tried = TRIES
    elif found.verdict == "fits":
        state.low, state.best = middle, found
    else:
        state.high, state.worst = middle, found

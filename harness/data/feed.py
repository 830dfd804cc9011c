"""Data feed: the samples, timesteps and noise that each step consumes.

A run's input depends only on (seed, step), not on the number of processes, the accumulation or the
strategy, so runs are comparable. Shape suffixes: B batch, C channels, H height, W width. The
launching process checks data without torch and numpy, and so does a plan.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strategies.base import BadInput
from strategies.subject import DataFacts

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor


NAMES = ("digits", "synthetic", "latents", "vae", "vae_small")
POOL = 256
"""Samples of ``synthetic``: 4 MiB at 32 x 32, little in comparison with a memory peak."""
IMAGES = 64
"""Samples of ``vae``: 12 MiB at 256 pixels."""
STAMPED = 20_000
"""Files of a latents folder whose times are read: a tenth of a second."""
TOGETHER = 256
"""Samples whose random values are generated at once: one by one takes five kernels each."""


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, size: int, epoch: int) -> np.ndarray:
    import numpy as np

    order = np.random.default_rng([seed, epoch]).permutation(size)
    order.setflags(write=False)
    return order


def sample_order(seed: int, size: int, first: int, count: int) -> np.ndarray:
    """Return the dataset indices, int64 [count], of the global positions from ``first`` on.

    Position p is in epoch ``p // size``; each epoch is its own shuffle of all samples.
    """
    import numpy as np

    parts, end = [], first + count
    while first < end:
        epoch, start = divmod(first, size)
        stop = min(size, start + end - first)
        parts.append(_permutation(seed, size, epoch)[start:stop])
        first += stop - start
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


# ---- sources ----


def check_data(name: str, *, thorough: bool = True) -> DataFacts:
    """Return facts of the data source ``name``, without torch.

    Names: digits, synthetic[:SIZE] (of a latent), latents:PATH, vae[:SIZE] or vae_small[:SIZE]
    (pixels of an image). Of a folder every header is read, or only the first unless ``thorough``.

    Raises:
        BadInput: one line that names the error and a remedy.
    """
    kind, _, detail = name.partition(":")
    if kind == "latents":
        if not detail:
            raise BadInput("latents needs a folder; write latents:PATH")
        from harness.data.latents import Folder

        return Folder(detail, thorough=thorough).facts
    if kind in ("vae", "vae_small"):
        pixels = int(detail or 256) if (detail or "256").isdecimal() else 0
        if pixels % 8 or pixels < 16:
            raise BadInput(
                f"{kind} cannot encode images of {detail!r} pixels; write {kind}:256, or "
                "another multiple of 8"
            )
        if importlib.util.find_spec("diffusers") is None:
            text = f"{kind} needs diffusers; pip install diffusers, or use --data synthetic"
            raise BadInput(text)
        return DataFacts(size=IMAGES, channels=4, input_size=pixels // 8, classes=1000)
    if kind == "digits" and not detail:
        if importlib.util.find_spec("sklearn") is None:
            raise BadInput("digits needs scikit-learn; install it, or use --data synthetic")
        return DataFacts(size=1797, channels=4, input_size=32, classes=10)
    if kind == "synthetic" and (not detail or (detail.isdecimal() and int(detail) > 0)):
        return DataFacts(size=POOL, channels=4, input_size=int(detail or 32), classes=1000)
    hint = "write digits, synthetic, latents:PATH or vae"
    if kind in NAMES:
        hint = "write digits, synthetic or synthetic:SIZE"
    elif near := difflib.get_close_matches(kind, NAMES, n=1):
        hint = f"did you mean {near[0]}?"
    raise BadInput(f"unknown data {name!r}; {hint}")


def stamp(name: str) -> list[tuple[str, int]]:
    """Return (name, modification time in ns) of a latents folder, its subfolders and first files.

    Adding or renaming a file changes its folder's time. Empty for other data.
    """
    kind, _, path = name.partition(":")
    if kind != "latents":
        return []
    folders = sorted(p for p in (Path(path), *Path(path).glob("*")) if p.is_dir())
    files = itertools.chain.from_iterable(map(os.scandir, folders))
    times = []
    for entry in itertools.islice(files, STAMPED):
        broken = entry.is_symlink() and not os.path.exists(entry.path)
        times.append((entry.name, entry.stat(follow_symlinks=not broken).st_mtime_ns))
    return [*((p.name, p.stat().st_mtime_ns) for p in folders), *sorted(times)]


# ---- the feed ----


class Dataset:
    """Samples by index."""

    facts: DataFacts

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor | Mapping[str, Tensor]]:
        """Return x float32 [n, C, H, W] and y int64 [n], both on the dataset's device.

        For a model that brings its own samples, return x in the model's layout, and its conditions
        by name. A ValueError names an unusable file.
        """
        raise NotImplementedError

    def begin(self, indices: np.ndarray) -> None:
        """Announce all indices that a step will fetch, in order."""

    def expect(self, indices: np.ndarray) -> None:
        """Announce the next fetch, so that reading can begin."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch: the inputs of the loss, and the facts that the audit records.

    ``conditions``: other inputs of the model, by name: labels "y" int64 [B], and "drop" bool [B],
    which labels are withheld. ``positions``: consumed dataset indices, int64 [B], in order.
    """

    x: Tensor
    t: Tensor
    noise: Tensor
    conditions: Mapping[str, Tensor]
    positions: np.ndarray


Drawn = dict[int, tuple["Tensor", "Tensor", "Tensor"]]
"""Block of a global batch -> random values of its samples."""


@dataclass(kw_only=True)
class Feed:
    """Micro-batches of one rank.

    It owns the ``share``-th of ``shares`` equal parts of every global batch, split into
    micro-batches in order; ranks that work on the same sample own the same share. ``draw`` is the
    objective's: it returns timesteps and noise from a generator. ``together`` is the size of a
    block of samples whose random values are generated at once: the only field that changes them.
    """

    dataset: Dataset
    draw: Callable[..., tuple[Tensor, Tensor]]
    seed: int
    global_batch: int
    shares: int
    share: int
    micro_batch: int
    class_dropout: float = 0.1
    together: int = TOGETHER
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        import torch

        parts = self.shares * self.micro_batch
        if self.global_batch % parts:
            raise ValueError(
                f"global_batch {self.global_batch} does not divide by {self.shares} "
                f"shares x micro_batch {self.micro_batch}; give a multiple of {parts}"
            )
        self._generator = torch.Generator(self.device)

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """Yield this rank's micro-batches of optimizer step ``step`` (from 0)."""
        size = self.global_batch // self.shares
        begin, end = self.share * size, (self.share + 1) * size
        self.dataset.begin(self._order(step, begin, size))
        drawn: Drawn = {}
        for start in range(begin, end, self.micro_batch):
            stop = start + self.micro_batch
            chosen = self._order(step, start, self.micro_batch)
            x, y = self.dataset.fetch(chosen)
            known = y if isinstance(y, Mapping) else {"y": y}
            coming = (step, stop) if stop < end else (step + 1, begin)
            self.dataset.expect(self._order(*coming, self.micro_batch))
            t_B, noise_BCHW, drop_B = self._chance(step, start, stop, drawn)
            yield Batch(x, t_B, noise_BCHW, {**known, "drop": drop_B}, chosen)

    def _order(self, step: int, start: int, count: int) -> np.ndarray:
        """Return the dataset indices of ``count`` samples of a step from position ``start`` on."""
        first = step * self.global_batch + start
        return sample_order(self.seed, self.dataset.facts.size, first, count)

    def _chance(
        self, step: int, start: int, stop: int, drawn: Drawn
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return timesteps, noise and withheld labels of samples ``start`` to ``stop`` of the
        global batch. ``drawn`` caches a block that the next micro-batch shares."""
        import torch

        parts = []
        for block in range(start // self.together, -(-stop // self.together)):
            first = block * self.together
            values = drawn.pop(block, None) or self._drawn(step, block)
            parts.append([value[max(start - first, 0) : stop - first] for value in values])
            if first + self.together > stop:
                drawn[block] = values
        # Even a single part is copied if samples are generated one by one. Without the copy a GPU's
        # pool would reserve some tenths of a GiB more or less for one batch than for others.
        if len(parts) == 1 and self.together > 1:
            return tuple(parts[0])
        return tuple(torch.cat(values) for values in zip(*parts, strict=True))

    def _drawn(self, step: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
        import numpy as np
        import torch

        count = min(self.together, self.global_batch - block * self.together)
        seed = np.random.SeedSequence([self.seed, step, block]).generate_state(1, np.uint64)[0]
        self._generator.manual_seed(int(seed >> np.uint64(1)))
        shape = self.dataset.facts.sample_shape
        t_B, noise = self.draw(self._generator, count, shape, self.device)
        chance_B = torch.rand(count, generator=self._generator, device=self.device)
        return t_B, noise, chance_B < self.class_dropout

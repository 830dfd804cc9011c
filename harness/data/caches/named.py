"""Caches by their name in a spec: ``musubi:FOLDER``, ``finetrainers:FOLDER``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.data.caches import finetrainers, musubi
from harness.data.caches.entries import Part, Sample
from strategies.base import BadInput

if TYPE_CHECKING:
    from torch import Tensor


KINDS = {"musubi": musubi, "finetrainers": finetrainers}


@dataclass(frozen=True)
class Cache:
    """A folder whose files have all been checked; ``tensor`` reads one of their tensors."""

    name: str
    samples: tuple[Sample, ...]
    tensor: Callable[[Part], Tensor]

    def faults(self) -> Iterator[str]:
        """Yield a line for each sample that cannot be trained on; every value is read."""
        for sample in self.samples:
            for part in sample.parts.values():
                if not self.tensor(part).float().isfinite().all():
                    text = f"{part.path}: {part.key} holds values that are not finite"
                    yield f"{text}; cache it again"
                    break


def is_cache(name: str) -> bool:
    """Return whether this data source is a cache of another trainer."""
    return name.partition(":")[0] in KINDS


def open_cache(name: str) -> Cache:
    """Return the cache called ``name``. Its headers are read again only if the folder changes.

    Raises:
        BadInput: one line that names the folder or file, the error and a remedy.
    """
    kind, _, detail = name.partition(":")
    folder = Path(detail).expanduser()
    if not detail or not folder.is_dir():
        raise BadInput(f"no folder {detail or ''}; write {kind}:FOLDER, {KINDS[kind].hint}")
    return _opened(name, _state(folder))


def _state(folder: Path) -> tuple[tuple[str, int], ...]:
    """Return names and times of the folder's files, which change with it."""
    paths = [p for p in folder.rglob("*") if p.suffix in (".safetensors", ".pt")]
    return tuple(sorted((str(path), path.stat().st_mtime_ns) for path in paths))


@functools.lru_cache(maxsize=8)
def _opened(name: str, state: tuple[tuple[str, int], ...]) -> Cache:
    kind, _, detail = name.partition(":")
    samples = KINDS[kind].find(Path(detail).expanduser())
    if not samples:
        raise BadInput(f"{detail} has no caches of {kind}; {KINDS[kind].hint}")
    return Cache(name, tuple(samples), KINDS[kind].tensor)

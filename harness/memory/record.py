"""Trace record: storages, events, memory categories and peaks. Imports no torch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.result import Categories

# ---- categories ----
# Predictions, measured steps and reports use these category names.


CATEGORIES = {
    "parameters": "weights as this rank stores them (its share, and low-precision copies)",
    "gathered": "weights of other ranks, gathered for the blocks at work",
    "gradients": "gradients, whole or this rank's share",
    "optimizer_state": "moments, and the float32 master weights of an engine that keeps them",
    "ema": "the averaged weights, and what else strategies keep beside the model",
    "activations": "kept by forward for backward",
    "recomputed": "activations computed again in backward",
    "autocast": "low-precision copies of float32 weights",
    "buckets": "communication buckets",
    "temporaries": "everything else: intermediate results, the optimizer's, kernel scratch",
}
"""Category -> description."""

MEASURED = {
    "parameters": ("parameters", "gathered"),
    "gradients": ("gradients",),
    "optimizer_state": ("optimizer_state",),
    "ema": ("ema",),
    "activations": ("activations", "autocast"),
    "workspace": ("temporaries", "recomputed"),
}
"""Field of ``harness.result.Categories`` -> categories that it sums.

The engine decides where buckets count: as gradients in communication, or as workspace beside the
gradients.
"""
_NAMES = {fine: name for name, parts in MEASURED.items() for fine in parts}
RESIDENT = "resident"
"""Category of models beside the trained one, such as text encoders. Only runs of a user's script
have them."""
_NAMES[RESIDENT] = RESIDENT


def measured_name(category: str, buckets: str) -> str:
    """Return the field of a measured run that includes ``category``."""
    return buckets if category == "buckets" else _NAMES[category]


def measured(sums: Mapping[str, int], buckets: str) -> dict[str, int]:
    """Return bytes by field of a measured run; ``buckets`` is the engine's field for buckets."""
    totals = dict.fromkeys(MEASURED, 0)
    for category, size in sums.items():
        name = measured_name(category, buckets)
        totals[name] = totals.get(name, 0) + size
    return totals


NVME = "nvme"
"""Pool of data that is swapped to files."""
PASSING = "passing"
"""Pool of storages that the device holds once, early in a training, and in no later step."""
ALLOCATED = "allocated"
"""All memory that a GPU's allocator has allocated: the pools "device" and "passing"."""


@dataclass(slots=True)
class Storage:
    """One storage of tensors.

    ``category`` is None until it is known. ``op`` allocated it, at the source line ``site`` if
    source lines are recorded. ``stream`` is the CUDA stream of the allocation; 0 is the compute
    stream.
    """

    size: int
    pool: str
    phase: str
    op: str
    site: str
    category: str | None = None
    freed_in: str | None = None
    stream: int = 0

    def within(self, pool: str | None) -> bool:
        """Return whether it is in ``pool``. None means the memory of this machine, without swap
        files and the passing pool."""
        if pool == ALLOCATED:
            return self.pool in ("device", PASSING)
        return self.pool == pool if pool else self.pool not in (NVME, PASSING)

    @property
    def kind(self) -> str:
        """Return the category. An unnamed storage that forward keeps for backward is an
        activation."""
        if self.category:
            return self.category
        kept = self.phase == "forward" and self.freed_in in ("backward", "optimizer", None)
        return "activations" if kept else "temporaries"


@dataclass(slots=True)
class Record:
    """A trace: storages, their events in order (+1 allocated, -1 freed), and the starts of phases.

    ``emptied`` has the events before which the allocator had to return its cache.
    """

    storages: list[Storage]
    events: list[tuple[int, int]]
    marks: list[tuple[int, str]]
    emptied: list[int] = field(default_factory=list)

    def pool_events(self, pool: str | None) -> Iterator[tuple[int, int, int, int]]:
        """Yield (sign, storage, bytes, stream) of one pool, in order; None: of all pools.

        An emptied cache yields zeros.
        """
        emptied = set(self.emptied)
        for at, (sign, index) in enumerate(self.events):
            if at in emptied:
                yield 0, 0, 0, 0
            storage = self.storages[index]
            if storage.within(pool):
                yield sign, index, storage.size, storage.stream

    def alive(self, end: int, pool: str | None = None) -> set[int]:
        """Return the storages of ``pool`` that are alive before event ``end``."""
        live: set[int] = set()
        for sign, index in self.events[:end]:
            if self.storages[index].within(pool):
                (live.add if sign > 0 else live.discard)(index)
        return live

    def phases(self) -> list[tuple[str, int, int]]:
        """Return (phase, first event, end of its events), in order."""
        ends = [at for at, _ in self.marks[1:]] + [len(self.events)]
        return [(name, at, end) for (at, name), end in zip(self.marks, ends, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Similar storages that are alive at a peak: their number, total bytes and origin."""

    category: str
    op: str
    site: str
    phase: str
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Instant:
    """Peak instant of a pool: its phase, op, source line and live storages, in bytes."""

    bytes: int
    phase: str
    op: str
    site: str
    categories: dict[str, int]
    held: list[Held]


def peak(record: Record, pool: str | None, first: int = 0, last: int | None = None) -> Instant:
    """Return the peak of ``pool`` (None: of all memory) among events ``first`` .. ``last``."""
    totals = running(record, pool)[first:last]
    best = max(totals, default=0)
    if not best:
        return Instant(bytes=0, phase="", op="", site="", categories={}, held=[])
    at = first + totals.index(best)
    sums: Counter[str] = Counter()
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for storage in (record.storages[index] for index in record.alive(at + 1, pool)):
        sums[storage.kind] += storage.size
        alike = (storage.kind, storage.op, storage.site, storage.phase)
        groups.setdefault(alike, []).append(storage.size)
    held = [
        Held(category=k, op=op, site=site, phase=phase, count=len(sizes), bytes=sum(sizes))
        for (k, op, site, phase), sizes in groups.items()
    ]
    newest = record.storages[record.events[at][1]]
    return Instant(
        bytes=best,
        phase=next((name for name, a, b in record.phases() if a <= at < b), newest.phase),
        op=newest.op,
        site=newest.site,
        categories={n: sums[n] for n in (*CATEGORIES, *([RESIDENT] if RESIDENT in sums else ()))},
        held=sorted(held, key=lambda alike: -alike.bytes)[:10],
    )


def running(record: Record, pool: str | None, wanted: Container[str] | None = None) -> list[int]:
    """Return the bytes in ``pool`` after each event; only of the ``wanted`` categories if given."""
    sizes = [
        s.size if s.within(pool) and (wanted is None or s.kind in wanted) else 0
        for s in record.storages
    ]
    return list(itertools.accumulate(sign * sizes[index] for sign, index in record.events))


def phase_peaks(
    record: Record, pool: str | None, wanted: Container[str] | None = None, begin: int = 0
) -> dict[str, int]:
    """Return phase -> peak bytes (of the ``wanted`` categories) over all its occurrences from event
    ``begin`` on."""
    totals, peaks = running(record, pool, wanted), dict[str, int]()
    for name, first, last in record.phases():
        if last > begin:
            most = max(totals[max(first, begin) : last], default=0)
            peaks[name] = max(peaks.get(name, 0), most)
    return peaks


def as_measured(instant: Instant, buckets: str) -> Categories:
    """Convert an instant to a measured run's categories; ``buckets`` is the engine's field."""
    sums: dict[str, Any] = {**measured(instant.categories, buckets)}
    return Categories(**sums, phase=instant.phase, where=instant.op)


def step_categories(record: Record, pool: str, buckets: str) -> Categories:
    """Return the categories of a measured run at the peak of ``pool``."""
    categories = as_measured(peak(record, pool), buckets)
    categories.beyond_state = max(running(record, pool, beyond_kinds(buckets)), default=0)
    categories.everywhere = max(running(record, None), default=0)
    return categories


def beyond_kinds(buckets: str) -> frozenset[str]:
    """Return the categories that are not state but activations (kept or recomputed) and workspace
    of a measured run; ``buckets`` is the engine's field."""
    beyond = {"activations", "workspace"}
    return frozenset(name for name in CATEGORIES if measured_name(name, buckets) in beyond)

"""What lived when: peaks, categories and the explanation of a peak, from a trace. No torch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

from harness.result import Categories

# ---- categories ----
# What memory is for: the one list of categories, and the fewer in which a measured run tells it.
#
# No torch: predictions, measured steps and reports name the same things by the same words.


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
"""Category -> what it holds."""

MEASURED = {
    "parameters": ("parameters", "gathered"),
    "gradients": ("gradients",),
    "optimizer_state": ("optimizer_state",),
    "ema": ("ema",),
    "activations": ("activations", "autocast"),
    "workspace": ("temporaries", "recomputed"),
}
"""Field of ``harness.result.Categories`` -> what it sums. Buckets count where their engine says:
as gradients on their way to their owners, or as workspace beside the gradients."""
INFERENCE = ("parameters", "activations", "workspace")
"""What a process that only infers holds."""
_NAMES = {fine: name for name, parts in MEASURED.items() for fine in parts}


def measured_name(category: str, buckets: str) -> str:
    """The field of a measured run in which ``category`` counts."""
    return buckets if category == "buckets" else _NAMES[category]


def measured(sums: Mapping[str, int], buckets: str) -> dict[str, int]:
    """Bytes by category as a measured run has them; ``buckets`` is the engine's word."""
    totals = dict.fromkeys(MEASURED, 0)
    for category, size in sums.items():
        totals[measured_name(category, buckets)] += size
    return totals


NVME = "nvme"
"""The pool of what is swapped to files."""
PASSING = "passing"
"""The pool of what the device holds once, early in a training, and in no later step."""
ALLOCATED = "allocated"
"""All that a GPU's allocator has given out: the device's pool, and what is passing."""


@dataclass(slots=True)
class Storage:
    """One storage of tensors. ``category`` is None until something says what it is; ``op`` made
    it, at the source line ``site`` where sites are looked up. ``stream`` is the CUDA stream on
    which it is allocated, 0 the one that computes."""

    size: int
    pool: str
    phase: str
    op: str
    site: str
    category: str | None = None
    freed_in: str | None = None
    stream: int = 0

    def within(self, pool: str | None) -> bool:
        """Whether it is kept in ``pool``; None: in the memory of this machine, not in files."""
        if pool == ALLOCATED:
            return self.pool in ("device", PASSING)
        return self.pool == pool if pool else self.pool not in (NVME, PASSING)

    @property
    def kind(self) -> str:
        """The category; what forward leaves behind for backward is an activation."""
        if self.category:
            return self.category
        kept = self.phase == "forward" and self.freed_in in ("backward", "optimizer", None)
        return "activations" if kept else "temporaries"


@dataclass(slots=True)
class Record:
    """A trace: storages, their (+1 made, -1 freed) events in order, where phases begin, and before
    which events the allocator was asked to return its cache."""

    storages: list[Storage]
    events: list[tuple[int, int]]
    marks: list[tuple[int, str]]
    emptied: list[int] = field(default_factory=list)

    def pool_events(self, pool: str | None) -> Iterator[tuple[int, int, int, int]]:
        """(sign, storage, bytes, stream) of one pool, in order, zeros where it was emptied; None:
        of all."""
        emptied = set(self.emptied)
        for at, (sign, index) in enumerate(self.events):
            if at in emptied:
                yield 0, 0, 0, 0
            storage = self.storages[index]
            if storage.within(pool):
                yield sign, index, storage.size, storage.stream

    def phases(self) -> list[tuple[str, int, int]]:
        """(phase, first event, event behind the last), in order."""
        ends = [at for at, _ in self.marks[1:]] + [len(self.events)]
        return [(name, at, end) for (at, name), end in zip(self.marks, ends, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Storages alike that lived at a peak: how many, how large together, and who made them."""

    category: str
    op: str
    site: str
    phase: str
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Instant:
    """The fullest instant of a pool: when, at which op and line, and what lived, in bytes."""

    bytes: int
    phase: str
    op: str
    site: str
    categories: dict[str, int]
    held: list[Held]


def peak(record: Record, pool: str | None, first: int = 0, last: int | None = None) -> Instant:
    """The fullest instant of ``pool`` (None: of all memory) among events ``first`` .. ``last``."""
    totals = running(record, pool)[first:last]
    best = max(totals, default=0)
    if not best:
        return Instant(bytes=0, phase="", op="", site="", categories={}, held=[])
    at, live = first + totals.index(best), set()
    for sign, index in record.events[: at + 1]:
        if record.storages[index].within(pool):
            (live.add if sign > 0 else live.discard)(index)
    return _instant(record, best, at, live)


def running(record: Record, pool: str | None, wanted: Container[str] | None = None) -> list[int]:
    """Bytes that ``pool`` holds after each event; of the ``wanted`` categories alone if given."""
    sizes = [
        s.size if s.within(pool) and (wanted is None or s.kind in wanted) else 0
        for s in record.storages
    ]
    return list(itertools.accumulate(sign * sizes[index] for sign, index in record.events))


def phase_peaks(
    record: Record, pool: str | None, wanted: Container[str] | None = None, begin: int = 0
) -> dict[str, int]:
    """Phase -> its highest bytes (of the ``wanted`` categories), wherever it was entered from the
    event ``begin`` on."""
    totals, peaks = running(record, pool, wanted), {}
    for name, first, last in record.phases():
        if last > begin:
            most = max(totals[max(first, begin) : last], default=0)
            peaks[name] = max(peaks.get(name, 0), most)
    return peaks


def _instant(record: Record, size: int, at: int, live: set[int]) -> Instant:
    storages = [record.storages[index] for index in live]
    sums: Counter[str] = Counter()
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for storage in storages:
        sums[storage.kind] += storage.size
        groups.setdefault((storage.kind, storage.op, storage.site, storage.phase), []).append(
            storage.size
        )
    held = [
        Held(category=k, op=op, site=site, phase=phase, count=len(sizes), bytes=sum(sizes))
        for (k, op, site, phase), sizes in groups.items()
    ]
    last = record.storages[record.events[at][1]]
    phase = next((name for name, a, b in record.phases() if a <= at < b), last.phase)
    return Instant(
        bytes=size,
        phase=phase,
        op=last.op,
        site=last.site,
        categories={name: sums[name] for name in CATEGORIES},
        held=sorted(held, key=lambda alike: -alike.bytes)[:10],
    )


def as_measured(instant: Instant, buckets: str) -> Categories:
    """The same instant in the words of a measured run; ``buckets`` is the engine's."""
    sums = measured(instant.categories, buckets)
    return Categories(**sums, phase=instant.phase, where=instant.op)


def step_categories(record: Record, pool: str, buckets: str) -> Categories:
    """What lived at the fullest instant of ``pool``, in the words of a measured run."""
    categories = as_measured(peak(record, pool), buckets)
    categories.beyond_state = beyond_state(record, pool, buckets)
    categories.everywhere = max(running(record, None), default=0)
    return categories


def beyond_state(record: Record, pool: str, buckets: str, first: int = 0) -> int:
    """The most that ``pool`` held at once beyond the state of a training, from event ``first`` on:
    activations, kept or computed again, and workspace, in the words of a measured run."""
    return max(running(record, pool, beyond_kinds(buckets))[first:], default=0)


def beyond_kinds(buckets: str) -> frozenset[str]:
    """The categories that are not state; ``buckets`` is the engine's word."""
    beyond = {"activations", "workspace"}
    return frozenset(name for name in CATEGORIES if measured_name(name, buckets) in beyond)


def by_place(record: Record, buckets: str, placed_by: str) -> Categories:
    """What lived at the peak of a step on the device, with what was kept in host memory beside it;
    ``placed_by`` says how the two were told apart."""
    categories = step_categories(record, "device", buckets)
    host = step_categories(record, "host", buckets)
    categories.host, categories.placed_by = host if host.total else None, placed_by
    return categories

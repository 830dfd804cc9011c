"""What lived when: peaks, categories and the explanation of a peak, from a trace. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from harness.result import Categories

__all__ = ["CATEGORIES", "Block", "Held", "Instant", "Record", "as_measured", "peak", "phase_peaks"]

CATEGORIES = {
    "parameters": "weights as this rank stores them (its share, and low-precision copies)",
    "gathered": "weights of other ranks, gathered for the blocks at work",
    "gradients": "gradients, whole or this rank's share",
    "optimizer_state": "moments, and the float32 master weights of ZeRO",
    "ema": "the averaged weights",
    "activations": "kept by forward for backward",
    "recomputed": "activations computed again in backward",
    "autocast": "low-precision copies of float32 weights",
    "buckets": "communication buckets",
    "temporaries": "everything else: intermediate results, the optimizer's, kernel scratch",
}
"""Category -> what it holds. The anatomy of a measured run has fewer: see ``as_measured``."""

MEASURED = {
    "parameters": ("parameters", "gathered"),
    "gradients": ("gradients",),
    "optimizer_state": ("optimizer_state",),
    "ema": ("ema",),
    "activations": ("activations", "autocast"),
    "workspace": ("temporaries", "recomputed"),
}


@dataclass(slots=True)
class Block:
    """One storage. ``category`` is None until something says what it is."""

    size: int
    pool: str
    phase: str
    op: str
    site: str
    category: str | None = None
    freed_in: str | None = None

    @property
    def kind(self) -> str:
        """The category; what forward leaves behind for backward is an activation."""
        if self.category:
            return self.category
        kept = self.phase == "forward" and self.freed_in in ("backward", "optimizer", None)
        return "activations" if kept else "temporaries"


@dataclass(slots=True)
class Record:
    """A trace: storages, their (+1 made, -1 freed) events in order, and where phases begin."""

    blocks: list[Block]
    events: list[tuple[int, int]]
    marks: list[tuple[int, str]]

    def pool_events(self, pool: str) -> Iterator[tuple[int, int, int]]:
        """(sign, block, bytes) of one pool, in order."""
        for sign, index in self.events:
            if self.blocks[index].pool == pool:
                yield sign, index, self.blocks[index].size

    def phases(self) -> list[tuple[str, int, int]]:
        """(phase, first event, event behind the last), in order."""
        ends = [at for at, _ in self.marks[1:]] + [len(self.events)]
        return [(name, at, end) for (at, name), end in zip(self.marks, ends, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Held:
    """Storages alike that lived at a peak: how many, how large together, and who made them."""

    category: str
    op: str
    site: str
    phase: str
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Instant:
    """The fullest instant of a pool: when, at which op and line, and what lived, in bytes."""

    bytes: int
    phase: str
    op: str
    site: str
    categories: dict[str, int]
    held: list[Held]


def peak(record: Record, pool: str, first: int = 0, last: int | None = None) -> Instant:
    """The fullest instant of ``pool`` among events ``first`` .. ``last``."""
    totals = running(record, pool)[first:last]
    best = max(totals, default=0)
    if not best:
        return Instant(bytes=0, phase="", op="", site="", categories={}, held=[])
    at, live = first + totals.index(best), set()
    for sign, index in record.events[: at + 1]:
        if record.blocks[index].pool == pool:
            (live.add if sign > 0 else live.discard)(index)
    return _instant(record, best, at, live)


def running(record: Record, pool: str) -> list[int]:
    """Bytes that ``pool`` holds after each event."""
    found, total = [], 0
    for sign, index in record.events:
        block = record.blocks[index]
        total += sign * block.size if block.pool == pool else 0
        found.append(total)
    return found


def phase_peaks(record: Record, pool: str) -> dict[str, int]:
    """Phase -> its highest bytes, wherever it was entered."""
    totals, found = running(record, pool), {}
    for name, first, last in record.phases():
        found[name] = max(found.get(name, 0), max(totals[first:last], default=0))
    return found


def _instant(record: Record, size: int, at: int, live: set[int]) -> Instant:
    blocks = [record.blocks[index] for index in live]
    sums: Counter[str] = Counter()
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for block in blocks:
        sums[block.kind] += block.size
        groups.setdefault((block.kind, block.op, block.site, block.phase), []).append(block.size)
    held = [
        Held(category=k, op=op, site=site, phase=phase, count=len(sizes), bytes=sum(sizes))
        for (k, op, site, phase), sizes in groups.items()
    ]
    last = record.blocks[record.events[at][1]]
    phase = next((name for name, a, b in record.phases() if a <= at < b), last.phase)
    return Instant(
        bytes=size,
        phase=phase,
        op=last.op,
        site=last.site,
        categories={name: sums[name] for name in CATEGORIES},
        held=sorted(held, key=lambda one: -one.bytes)[:10],
    )


def as_measured(instant: Instant, *, deepspeed: bool) -> Categories:
    """The same instant in the words of a measured run's anatomy.

    DeepSpeed's buckets hold gradients on their way to their owners, and are counted as gradients
    there; DDP's are a second copy beside the gradients, and are workspace.
    """
    sums = {k: sum(instant.categories.get(n, 0) for n in names) for k, names in MEASURED.items()}
    sums["gradients" if deepspeed else "workspace"] += instant.categories.get("buckets", 0)
    return Categories(**sums, phase=instant.phase, where=instant.op)

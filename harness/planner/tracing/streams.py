"""Allocation streams of a trace: the block boundaries in it, and the matching of two streams.
A stream has the allocations and frees on the device, in order, cut where phases and blocks
begin."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from harness.memory.record import ALLOCATED, Record
from harness.planner.tracing.trace import StoragelessTracer
from strategies.engine import TrainingRun

# A step of a deep model repeats the events of one block. Cut at the block boundaries, each part of
# a step grows linearly with the number of blocks. A shallow model therefore predicts a deep one,
# even if another part becomes the fullest (``harness.planner.tracing.extend``).


class Border(NamedTuple):
    """Start of a block.
    ``event``: its index in the record. ``group`` and ``index``: the block. ``place``: "first",
    "last" or "between" in the group."""

    event: int
    group: int
    index: int
    place: str


@dataclass
class Part:
    """Fullest instant of all parts with one name.
    ``bytes`` and ``kinds`` (bytes by category), after the allocation of ``op`` at ``site``.
    ``beyond``: the most bytes beyond the training's state, perhaps at another instant."""

    op: str
    site: str
    bytes: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    beyond: int = 0


@contextlib.contextmanager
def bordered(run: TrainingRun, borders: list[Border], record: Record) -> Iterator[None]:
    """Append the start of each block to ``borders`` while the context is active."""
    handles = []
    for number, group in enumerate(run.subject.groups(run.module)):
        for index, block in enumerate(group):
            place = "first" if index == 0 else "last" if index == len(group) - 1 else "between"

            def note(*_: Any, which: Any = (number, index, place)) -> None:
                borders.append(Border(len(record.events), *which))

            def after(_: Any, __: Any, out: Any, note: Any = note) -> None:
                """Call ``note`` when the output's gradient exists, where backward begins."""
                for leaf in tree_leaves(out):
                    if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                        leaf.register_hook(lambda gradient: note())

            handles.append(block.register_forward_pre_hook(note))
            handles.append(block.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def parts(
    tracer: StoragelessTracer,
    borders: list[Border],
    pool: str,
    steady_from: int,
    beyond: Container[str] = (),
) -> dict[str, Part]:
    """Return part name ("step/phase/block") -> its fullest instant in ``pool``.
    The step is "2" from the event ``steady_from`` on, "1" before. ``beyond``: categories that are
    not state."""
    record = tracer.record
    blocks = [(one.event, 1, "", f"{one.group}.{one.place}") for one in borders]
    cuts = sorted([*((at, 0, phase, "") for at, phase in record.marks), *blocks])
    found: dict[str, Part] = {}
    sums: dict[str, int] = {}
    total, more, phase, block, passed = 0, 0, "", "", 0
    first = record.storages[record.events[0][1]] if record.events else None
    for event, (sign, index) in enumerate(record.events):
        while passed < len(cuts) and cuts[passed][0] <= event:
            phase, block = cuts[passed][2] or phase, cuts[passed][3]
            passed += 1
        storage = record.storages[index]
        if not storage.within(pool):
            continue
        total += sign * storage.size
        more += sign * storage.size if storage.kind in beyond else 0
        sums[storage.kind] = sums.get(storage.kind, 0) + sign * storage.size
        name = f"{1 + (event >= steady_from)}/{phase}/{block}"
        part = found.setdefault(name, Part(first.op, first.site))
        part.beyond = max(part.beyond, more)
        if total > part.bytes:
            part.bytes, part.kinds = total, dict(sums)
            part.op, part.site = storage.op, storage.site
    return found


GAP, RESIZED = 2, 3
"""Costs of a match between two streams: for each run of allocations that only the longer stream
has, and for each allocation of another size."""
LONGEST = 40_000_000
"""Most cells of a comparison; a larger one would take too long."""


class Kind(NamedTuple):
    """Identity of an allocation: the operation and line that make it, its bytes, and its CUDA
    stream."""

    maker: str
    size: int
    stream: int = 0


@dataclass(frozen=True)
class Stream:
    """Allocations and frees in order.
    ``events``: +n allocates storage n, -n frees it, 0 empties the cache; n counts from 1.
    ``kinds``: of each storage. ``cuts``: (event, phase, group, index), where a phase (group and
    index -1) or a block begins."""

    events: Sequence[int]
    kinds: Sequence[Kind]
    cuts: Sequence[tuple[int, str, int, int]]


def stream_to_data(record: Record, borders: Sequence[Border]) -> dict[str, Any]:
    """Return the device's part of a trace as JSON data, which ``stream_from_data`` reads."""
    numbers: dict[int, int] = {}
    events, before, emptied = [], [], set(record.emptied)
    for at, (sign, index) in enumerate(record.events):
        before.append(len(events))
        if at in emptied:
            events.append(0)
        if record.storages[index].within(ALLOCATED):
            events.append(sign * numbers.setdefault(index, len(numbers) + 1))
    before.append(len(events))
    storages = [record.storages[index] for index in numbers]
    names = {f"{s.op} {s.site}": None for s in storages}
    number = {name: n for n, name in enumerate(names)}
    cuts = [(before[at], phase, -1, -1) for at, phase in record.marks]
    cuts += [(before[one.event], "", one.group, one.index) for one in borders]
    return {
        "events": events,
        "kinds": [(number[f"{s.op} {s.site}"], s.size, s.stream) for s in storages],
        "names": list(names),
        "cuts": sorted(cuts, key=lambda cut: (cut[0], cut[2] >= 0)),
    }


def stream_from_data(data: Mapping[str, Any]) -> Stream:
    """Return the stream in the data of ``stream_to_data``."""
    kinds = [Kind(data["names"][number], *known) for number, *known in data["kinds"]]
    return Stream(data["events"], kinds, [tuple(cut) for cut in data["cuts"]])


@dataclass
class Segment:
    """Events from one boundary to the next.
    ``interval``: number of the phase. ``group`` and ``index``: the block, or -1 before the phase's
    first block."""

    interval: int
    phase: str
    group: int = -1
    index: int = -1
    events: list[int] = field(default_factory=list)

    def made(self) -> list[int]:
        return [event for event in self.events if event > 0]


def segments(stream: Stream) -> list[Segment]:
    """Return the stream's segments, in order.
    A block that begins again at once continues its segment, as in recomputation during backward."""
    found = [Segment(-1, "")]
    cuts = [*stream.cuts, (len(stream.events), "", -1, -1)]
    for number, (at, phase, group, index) in enumerate(stream.cuts):
        last = found[-1]
        if group < 0:
            found.append(Segment(last.interval + 1, phase))
        elif (group, index) != (last.group, last.index):
            found.append(Segment(last.interval, last.phase, group, index))
        found[-1].events.extend(stream.events[at : cuts[number + 1][0]])
    found[0].events.extend(stream.events[: cuts[0][0]])
    return found


def alike(short: Sequence[Kind], long: Sequence[Kind]) -> list[int] | None:
    """Return for each allocation of ``long`` the index of its match in ``short``, or -1.
    The match has the least cost (``GAP``, ``RESIZED``). Return None if ``long`` lacks an allocation
    of ``short``."""
    pairs = enumerate(zip(short, long, strict=False))
    begin = next((n for n, (one, other) in pairs if one != other), min(len(short), len(long)))
    inner = _cheapest(short[begin:], long[begin:])
    return None if inner is None else [*range(begin), *(n + begin if n >= 0 else -1 for n in inner)]


def _cheapest(short: Sequence[Kind], long: Sequence[Kind]) -> list[int] | None:
    more = len(long) - len(short)
    if more < 0 or len(short) * (more + 1) > LONGEST:
        return None
    names = {name: n for n, name in enumerate({kind.maker for kind in (*short, *long)})}
    makers = np.array([names[kind.maker] for kind in long], dtype=np.int64)
    sizes = np.array([kind.size for kind in long], dtype=np.int64)
    # best[k]: cost of the match so far, with k of ``long`` skipped.
    best = np.full(more + 1, float(GAP))
    best[0] = 0
    came, places = [], np.arange(more + 1)
    for i, kind in enumerate(short):
        # Candidates in ``long`` end where the rest of ``short`` still fits.
        same = makers[i : i + more + 1] == names[kind.maker]
        sized = np.where(sizes[i : i + more + 1] == kind.size, 0.0, RESIZED)
        least = np.minimum.accumulate(best)  # up to each position, and its index
        at = np.maximum.accumulate(np.where(best == least, places, 0))
        least = np.concatenate([[np.inf], least[:-1]])
        at = np.concatenate([[0], at[:-1]])
        came.append(np.where(best <= least + GAP, places, at))
        best = np.minimum(best, least + GAP) + np.where(same, sized, np.inf)
    best[:-1] += GAP
    k = int(best.argmin())
    if not np.isfinite(best[k]):
        return None
    found = [-1] * len(long)
    for i in reversed(range(len(short))):
        found[i + k] = i
        k = int(came[i][k])
    return found


def gaps(match: Sequence[int]) -> list[list[int]]:
    """Return the runs of positions without a counterpart."""
    found: list[list[int]] = []
    for place, counterpart in enumerate(match):
        if counterpart < 0:
            if not (found and found[-1][-1] == place - 1):
                found.append([])
            found[-1].append(place)
    return found


def numbered(kinds: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return each kind with the number of equal ones before it."""
    seen: Counter[Any] = Counter()
    found = []
    for kind in kinds:
        found.append((kind, seen[kind]))
        seen[kind] += 1
    return found

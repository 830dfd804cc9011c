"""Simulation of CUDA's caching allocator: the reserved memory for allocations in a given order.
Source of the rules: torch 2.13, c10/cuda/CUDACachingAllocator.cpp and CUDAAllocatorConfig.h. Each
stream has its own pools. A freed block is reusable at once, even if another stream used it too."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

ROUND = 512
SMALL_SIZE, SMALL_BUFFER = 2**20, 2 * 2**20
LARGE_BUFFER, MIN_LARGE_ALLOC = 20 * 2**20, 10 * 2**20
LARGE_ROUND = 2 * 2**20


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Peaks in bytes. ``fits``: every allocation succeeded under the limit, if need be after all
    cached memory was returned."""

    allocated: int
    reserved: int
    fits: bool = True


@dataclass(slots=True, eq=False)
class Chunk:
    """A piece of a segment; neighbours merge if both are free."""

    size: int
    pool: Pool
    address: int
    free: bool = True
    left: Chunk | None = None
    right: Chunk | None = None


@dataclass(slots=True, eq=False)
class Pool:
    """Free chunks of one size class of a stream, by (size, address).
    ``begin``: first address of an expandable pool. ``tail``: the last chunk of its range."""

    small: bool
    begin: int
    free: list[tuple[int, int]] = field(default_factory=list)
    chunks: dict[int, Chunk] = field(default_factory=dict)
    tail: Chunk | None = None

    def add(self, chunk: Chunk) -> None:
        bisect.insort(self.free, (chunk.size, chunk.address))
        self.chunks[chunk.address] = chunk

    def drop(self, chunk: Chunk) -> None:
        del self.free[bisect.bisect_left(self.free, (chunk.size, chunk.address))]
        del self.chunks[chunk.address]

    def best(self, size: int) -> Chunk | None:
        """Return the smallest free chunk of at least ``size`` bytes, or None."""
        at = bisect.bisect_left(self.free, (size, 0))
        return self.chunks[self.free[at][1]] if at < len(self.free) else None


class Allocator:
    """Caching allocator with default segments, or one growing range per pool (``expandable``).
    ``limit`` is in bytes."""

    def __init__(self, *, expandable: bool = False, limit: int | None = None) -> None:
        self.expandable, self.limit = expandable, limit
        self.pools: dict[tuple[int, bool], Pool] = {}
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.fits = True
        self._next = 0

    def allocate(self, size: int, stream: int = 0) -> Chunk:
        """Return a chunk for ``size`` bytes on ``stream``."""
        wanted = max(ROUND, -(-size // ROUND) * ROUND)
        key = stream, wanted <= SMALL_SIZE
        if key not in self.pools:  # 2**50 addresses apart, so that ranges do not overlap
            self.pools[key] = Pool(small=key[1], begin=len(self.pools) << 50)
        pool = self.pools[key]
        chunk = pool.best(wanted)
        if chunk is not None:
            pool.drop(chunk)
        else:
            chunk = self._grow(pool, wanted)
        self._split(chunk, wanted)
        chunk.free = False
        self.allocated += chunk.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return chunk

    def release(self, chunk: Chunk) -> None:
        """Return a chunk to its pool, merged with free neighbours."""
        self.allocated -= chunk.size
        for side in (chunk.left, chunk.right):
            if side is not None and side.free:
                chunk.pool.drop(side)
                self._merge(chunk, side)
        chunk.free = True
        chunk.pool.add(chunk)

    def _split(self, chunk: Chunk, wanted: int) -> None:
        """Free the rest of a chunk if it is large enough.
        Large default segments keep rests of up to 1 MiB."""
        rest, pool = chunk.size - wanted, chunk.pool
        least = ROUND if pool.small or self.expandable else SMALL_SIZE + 1
        if rest < least:
            return
        behind = Chunk(rest, pool, chunk.address + wanted, True, chunk, chunk.right)
        if chunk.right is not None:
            chunk.right.left = behind
        chunk.right, chunk.size = behind, wanted
        if pool.tail is chunk:
            pool.tail = behind
        pool.add(behind)

    @staticmethod
    def _merge(chunk: Chunk, side: Chunk) -> None:
        """Merge ``side``, which is free and not in its pool's list, into ``chunk``."""
        if side is chunk.left:
            chunk.left, chunk.address = side.left, side.address
            if side.left is not None:
                side.left.right = chunk
        else:
            chunk.right = side.right
            if side.right is not None:
                side.right.left = chunk
            if chunk.pool.tail is side:
                chunk.pool.tail = chunk
        chunk.size += side.size

    def _grow(self, pool: Pool, wanted: int) -> Chunk:
        if self.expandable:
            return self._extend(pool, wanted)
        if pool.small:
            size = SMALL_BUFFER
        elif wanted < MIN_LARGE_ALLOC:
            size = LARGE_BUFFER
        else:
            size = -(-wanted // LARGE_ROUND) * LARGE_ROUND
        self._reserve(size)
        self._next += size
        return Chunk(size, pool, self._next - size)

    def _extend(self, pool: Pool, wanted: int) -> Chunk:
        """Map more pages at the end of the pool's range; a free tail is part of the new chunk."""
        granule = SMALL_BUFFER if pool.small else LARGE_BUFFER
        tail = pool.tail
        have = tail.size if tail is not None and tail.free else 0
        more = -(-(wanted - have) // granule) * granule
        self._reserve(more)
        if have:
            pool.drop(tail)
            tail.size += more
            return tail
        base = tail.address + tail.size if tail is not None else pool.begin
        chunk = Chunk(more, pool, base, True, tail)
        if tail is not None:
            tail.right = chunk
        pool.tail = chunk
        return chunk

    def _reserve(self, size: int) -> None:
        if self.limit is not None and self.reserved + size > self.limit:
            self.empty()
            self.fits = self.fits and self.reserved + size <= self.limit
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def empty(self) -> None:
        """Return whole free segments to the device, as ``empty_cache`` does, and a failing
        allocation."""
        for pool in self.pools.values():
            for chunk in list(pool.chunks.values()):
                if self.expandable:
                    if chunk is not pool.tail:
                        continue
                    pool.tail = chunk.left
                    if chunk.left is not None:
                        chunk.left.right = None
                elif chunk.left is not None or chunk.right is not None:
                    continue
                pool.drop(chunk)
                self.reserved -= chunk.size


def replay(
    events: Iterable[tuple[int, ...]], *, expandable: bool = False, limit: int | None = None
) -> Usage:
    """Return the peaks for events in order.
    Events are (+1 allocated, -1 freed or 0 cache emptied, id, bytes, stream); without a stream they
    are of the compute stream."""
    allocator, chunks = Allocator(expandable=expandable, limit=limit), {}
    for sign, index, size, *stream in events:
        if sign > 0:
            chunks[index] = allocator.allocate(size, *stream)
        elif sign == 0:
            allocator.empty()
        else:
            allocator.release(chunks.pop(index))
    return Usage(
        allocated=allocator.peak_allocated, reserved=allocator.peak_reserved, fits=allocator.fits
    )

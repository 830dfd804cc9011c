"""Allocations of a deep model in order, derived from the streams of shallow models.
The base model has two blocks per group. Each deeper one has four in one group: a first, two inner
and a last block. Its additional events repeat for each inner block of the deep model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.planner.tracing.streams import (  # fmt: skip
    Kind,
    Segment,
    Stream,
    alike,
    gaps,
    numbered,
    segments,
)

BETWEEN = (1, 2)
"""Indices of the inner blocks, of four."""
LAST = 3
LOST = 0.002
"""Share of events without a known storage above which the result is discarded."""


class NotAlike(ValueError):
    """The streams do not show which events a block adds."""


class Ref(NamedTuple):
    """A storage of a deeper stream.
    ``fixed``: its number in the base, or 0. A block's storage also has a ``key``, equal for all
    blocks, and the ``index`` of its block."""

    fixed: int
    key: tuple[Any, ...] = ()
    index: int = -1

    @property
    def repeated(self) -> bool:
        return self.index in BETWEEN


@dataclass
class Deeper:
    """Stream of a model with two more blocks in one group, which has ``count`` in the deep model.
    ``before``: number of blocks of other groups before them, if all are in one list."""

    stream: Stream
    count: int
    before: int = 0


Emitted = tuple[int, Ref, int]
"""An event of the deep model: its sign, the storage, and the shift of its block's index."""


def extrapolate_blocks(base: Stream, deeper: Sequence[Deeper]) -> list[tuple[int, int, int, int]]:
    """Return the events of the device's pool with all blocks.

    Each is (+1 allocated, -1 freed or 0 cache emptied, id, bytes, CUDA stream). Events of inner
    blocks repeat as whole segments (forward and backward), and as runs elsewhere (weights,
    gradients, optimizer operations). A key identifies a block's storage by its position in the
    segment or run, so a free refers to a block by its distance.

    Raises:
        NotAlike: the streams do not show what a block adds.
    """
    plain = segments(base)
    read = [_Reading(plain, base, one) for one in deeper]
    dropped = {event for one in read for event in one.moved}
    made = _Made(base, read)
    for number, segment in enumerate(plain):
        for at, event in enumerate([None, *segment.events], -1):  # -1: before the first event
            if event == 0:
                made.events.append((0, 0, 0, 0))
            elif event and event not in dropped:
                made.event(event, Ref(abs(event)), None, 0)
            for one in read:
                for added, ref, shift in one.added.get((number, at), ()):
                    made.event(added, ref, one, shift)
        for one in read:
            for added, ref, shift in one.between(number):
                made.event(added, ref, one, shift)
    if made.lost > LOST * len(made.events):
        raise NotAlike(f"{made.lost} of {len(made.events)} events refer to nothing")
    return made.events


class _Made:
    """Events of the deep model, as they are generated."""

    def __init__(self, base: Stream, read: Sequence[_Reading]) -> None:
        self.events: list[tuple[int, int, int, int]] = []
        self.live: dict[Any, tuple[int, int, int]] = {}
        self.lost = self.count = 0
        self.sizes = [0, *(kind.size for kind in base.kinds)]
        self.streams = [0, *(kind.stream for kind in base.kinds)]
        for number in range(1, len(self.sizes)):
            own = base.kinds[number - 1].size
            grown = sum((one.sizes.get(number, own) - own) * (one.count / 2 - 1) for one in read)
            self.sizes[number] = max(0, round(own + grown))

    def event(self, event: int, ref: Ref, reading: _Reading | None, shift: int) -> None:
        """Add the allocation or free of storage ``ref``, with its block's index moved by
        ``shift``."""
        name: Any = ref.fixed
        if ref.key and reading is not None:
            name = reading.name(ref, shift)
        if event > 0 and name not in self.live:
            self.count += 1
            known = isinstance(name, int)
            size = self.sizes[name] if known else ref.key[-1].size
            stream = self.streams[name] if known else ref.key[-1].stream
            self.live[name] = (self.count, size, stream)
            self.events.append((1, *self.live[name]))
        elif event < 0 and name in self.live:
            self.events.append((-1, *self.live.pop(name)))
        else:
            self.lost += 1


class _Reading:
    """Events that a deeper stream adds to the base.
    ``added``: (segment of the base, position of an event in it) -> events after it. ``moved``:
    events of the base that come elsewhere. ``sizes``: bytes in the deeper model of the base's
    storages."""

    def __init__(self, plain: Sequence[Segment], base: Stream, deeper: Deeper) -> None:
        self.count, self.stream = deeper.count, deeper.stream
        self.group, self.begin = _grown(base, deeper)
        self.added: dict[tuple[int, int], list[Emitted]] = {}
        self.moved: set[int] = set()
        self.sizes: dict[int, int] = {}
        self._refs: dict[int, Ref] = {}
        self._ends: dict[tuple[Any, int], int] = {}
        # Events that empty the cache come from the base.
        every = segments(deeper.stream)
        for segment in every:
            segment.events = [*filter(None, segment.events)]
        owns, self._blocks = self._paired(plain, every)
        for number, (segment, own) in enumerate(zip(plain, owns, strict=True)):
            self._match(number, segment, own, base)
            for block in self._blocks[number]:
                kinds = [self._kind(event) for event in block.made()]
                for event, key in zip(block.made(), _keys(block, kinds), strict=True):
                    self._refs[event] = Ref(0, key, block.index)
                freed = (self.ref(event).fixed for event in block.events if event < 0)
                self.moved |= {-fixed for fixed in freed if fixed}
        for number, (segment, own) in enumerate(zip(plain, owns, strict=True)):
            _Placing(self, number, segment, own).place()

    def name(self, ref: Ref, shift: int) -> Any:
        """Return the deep model's name of a storage, with its block's index moved by ``shift``."""
        index = ref.index + shift
        end = {0: 0, self.count - 1: LAST}.get(index)
        fixed = self._ends.get((ref.key, end), 0)
        return fixed or (self.group, self.begin, ref.key, index)

    def absolute(self, ref: Ref) -> int:
        """Return the shift that keeps a block's distance to the nearer end."""
        return 0 if ref.index < BETWEEN[1] else self.count - 1 - LAST

    def between(self, number: int) -> Iterator[Emitted]:
        """Yield the events of all inner blocks that come after this segment of the base."""
        if not self._blocks[number]:
            return
        first, second = self._blocks[number]
        inner = range(1, self.count - 1)
        for place, index in enumerate(inner if first.index == 1 else reversed(inner)):
            segment = second if place else first
            for event in segment.events:
                yield _sign(event), self._refs[abs(event)], index - segment.index

    def ref(self, event: int) -> Ref:
        return self._refs[abs(event)]

    def _paired(
        self, plain: Sequence[Segment], every: Sequence[Segment]
    ) -> tuple[list[Segment], list[list[Segment]]]:
        """Return the segments that the base has too, and after each of them those of the inner
        blocks."""
        own: list[Segment] = []
        blocks: list[list[Segment]] = []
        for segment in every:
            if segment.group == self.group:
                segment.index -= self.begin
            if segment.group == self.group and segment.index in BETWEEN:
                blocks[-1].append(segment)
            else:
                own.append(segment)
                blocks.append([])
        for one, here in itertools.zip_longest(own, plain, fillvalue=Segment(-2, "")):
            index = one.index
            if one.group == self.group:  # as in the base
                index += self.begin - (len(BETWEEN) if index >= LAST else 0)
            known = here.interval, here.phase, here.group, here.index
            if (one.interval, one.phase, one.group, index) != known:
                raise NotAlike("phases or blocks come in another order")
        if any(sorted(s.index for s in found) not in ([], [*BETWEEN]) for found in blocks):
            raise NotAlike("blocks do not follow one another")
        return own, blocks

    def _kind(self, event: int) -> Kind:
        return self.stream.kinds[event - 1]

    def _match(self, number: int, segment: Segment, own: Segment, base: Stream) -> None:
        """Match the base's storages; all others repeat for each inner block."""
        kinds, made = [base.kinds[event - 1] for event in segment.made()], own.made()
        match = alike(kinds, [self._kind(event) for event in made])
        if match is None:
            raise NotAlike(f"another {segment.phase or 'set-up'}")
        ends = own.group == self.group and own.index in (0, LAST)
        keys = _keys(segment, kinds) if ends else [()] * len(kinds)
        for event, counterpart in zip(made, match, strict=True):
            if counterpart >= 0:
                fixed = segment.made()[counterpart]
                index = own.index if keys[counterpart] else -1
                self._refs[event] = Ref(fixed, keys[counterpart], index)
                self._ends[keys[counterpart], index] = fixed
                self.sizes[fixed] = self._kind(event).size
        for run, places in enumerate(gaps(match)):
            self._repeated((number, run), [made[place] for place in places], segment.phase)

    def _repeated(self, where: tuple[int, int], made: Sequence[int], phase: str) -> None:
        """Assign the allocations of a run to the two inner blocks."""
        pieces, at = _squares([self._kind(event) for event in made]), 0
        if pieces is None:
            raise NotAlike(f"blocks differ in {phase or 'set-up'}")
        for length in pieces:
            half = length // 2
            for place, event in enumerate(made[at : at + length]):
                key = ("run", *where, at, place % half, self._kind(event))
                self._refs[event] = Ref(0, key, BETWEEN[place // half])
            at += length


def _grown(base: Stream, deeper: Deeper) -> tuple[int, int]:
    """Return the group with more blocks than in the base, and the first of its four blocks
    there."""
    few, many = _counts(base), _counts(deeper.stream)
    grown = [group for group, count in many.items() if count == few.get(group, 0) + 2]
    if len(grown) != 1:
        raise NotAlike("no group, or several, have more blocks")
    return grown[0], deeper.before if few[grown[0]] > 2 else 0


def _counts(stream: Stream) -> dict[int, int]:
    """Return group -> number of its blocks."""
    found: dict[int, int] = {}
    for _, _, group, index in stream.cuts:
        if group >= 0:
            found[group] = max(found.get(group, 0), index + 1)
    return found


def _keys(segment: Segment, kinds: Sequence[Kind]) -> list[tuple[Any, ...]]:
    """Return the key of each storage of a block, which is equal in every block."""
    return [("block", segment.interval, order, kind) for kind, order in numbered(kinds)]


def _sign(event: int) -> int:
    return 1 if event > 0 else -1


class _Placing:
    """Positions of a deeper stream's events within one segment of the base."""

    def __init__(self, reading: _Reading, number: int, segment: Segment, own: Segment) -> None:
        self.reading, self.number, self.own = reading, number, own
        self.places = {event: at for at, event in enumerate(segment.events)}
        self.at = -1
        freed = [reading.ref(event) for event in own.events if event < 0]
        here = {(ref.key, ref.index) for ref in freed if ref.repeated}
        self.both = {key for key, _ in here if all((key, index) in here for index in BETWEEN)}
        """Keys of storages that both inner blocks free in this segment."""
        self.first: dict[Any, int] = {}

    def place(self) -> None:
        stretch: list[int] = []
        for event in self.own.events:
            if event > 0 and not self.reading.ref(event).repeated:
                self._stretch(stretch)
                self.at = self.places[self.reading.ref(event).fixed]
                stretch = []
            else:
                stretch.append(event)
        self._stretch(stretch)

    def _stretch(self, events: Sequence[int]) -> None:
        """Place the events between two allocations of the base, such as a run of the blocks'
        allocations."""
        refs = [self.reading.ref(event) for event in events]
        made = [n for n, event in enumerate(events) if event > 0]
        if not made:
            self._frees(events)
            return
        begins = [
            n for last, n in zip([-1, *made], made, strict=False)
            if last < 0 or refs[last].index > refs[n].index
        ]  # fmt: skip
        end = made[-1] + 1
        while end < len(events) and refs[end].repeated:
            end += 1
        self._frees(events[: begins[0]])
        for begin, behind in zip(begins, [*begins[1:], end], strict=True):
            second = (n for n in made if n >= begin and refs[n].index == BETWEEN[1])
            self._made_run(events[begin:behind], next(second, behind) - begin)
        self._frees(events[end:])

    def _frees(self, events: Sequence[int]) -> None:
        """Place frees of the base and of blocks."""
        refs, at = [self.reading.ref(event) for event in events], 0
        inner = range(1, self.reading.count - 1)
        while at < len(events):
            if not refs[at].repeated:
                here = self.places.get(-refs[at].fixed)
                if here is None:
                    self._moved(events[at])
                else:
                    self.at = max(self.at, here)
                at += 1
                continue
            half, first = _twins(refs[at:]), refs[at].index
            if not half:
                self._freed(events[at], refs[at])
                at += 1
                continue
            # The same frees for each inner block.
            for index in inner if first == BETWEEN[0] else reversed(inner):
                for event in events[at : at + half]:
                    self._add(event, self.reading.ref(event), index - first)
            at += 2 * half

    def _moved(self, event: int) -> None:
        ref = self.reading.ref(event)
        self.reading.moved.add(-ref.fixed)
        self._add(event, ref, 0)

    def _add(self, event: int, ref: Ref, shift: int) -> None:
        added = self.reading.added.setdefault((self.number, self.at), [])
        added.append((_sign(event), ref, shift))

    def _made_run(self, events: Sequence[int], second: int) -> None:
        """Add the first inner block's part of a run once, and the second's for each further
        block."""
        for event in events:
            self.both.discard(self.reading.ref(event).key)
        for event in events[:second]:
            self._once(event)
        for index in range(2, self.reading.count - 1):
            for event in events[second:]:
                ref = self.reading.ref(event)
                if ref.repeated:
                    self._add(event, ref, index - 2)
                elif index == 2:
                    self._once(event)

    def _once(self, event: int) -> None:
        ref = self.reading.ref(event)
        if ref.repeated:
            self._add(event, ref, self.reading.absolute(ref))
        else:
            self._moved(event)

    def _freed(self, event: int, ref: Ref) -> None:
        """Add a free that is outside of any run.
        If both inner blocks free this key here, the first of the two events repeats for all inner
        blocks except the last in this order. Else it is added once."""
        both = ref.repeated and ref.key in self.both
        first = self.first.setdefault(ref.key, ref.index) if both else -1
        if ref.index != first or not both:
            self._once(event)
            return
        count = self.reading.count
        inner = range(1, count - 2) if first == 1 else range(count - 2, 1, -1)
        for index in inner:
            self._add(event, ref, index - first)


def _twins(refs: Sequence[Ref]) -> int:
    """Return how many frees of one block at the start of ``refs`` the other inner block repeats."""
    first = refs[0].index
    own = next((n for n, ref in enumerate(refs) if ref.index != first), 0)
    for half in range(own, 0, -1):
        other = refs[half : 2 * half]
        if all(ref.repeated and ref.index != first for ref in other) and [
            r.key for r in refs[:half]
        ] == [r.key for r in other]:
            return half
    return 0


def _squares(kinds: Sequence[Kind]) -> list[int] | None:
    """Return the lengths of pieces that each repeat a sequence twice, or None."""
    found, at = [], 0
    while at < len(kinds):
        longest = (len(kinds) - at) // 2
        twice = (
            n for n in range(longest, 0, -1) if kinds[at : at + n] == kinds[at + n : at + 2 * n]
        )
        half = next(twice, 0)
        if not half:
            return None
        found.append(2 * half)
        at += 2 * half
    return found

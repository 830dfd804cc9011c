"""Allocations of a deep model from those of shallow ones, on a model of few lines whose
allocations of any depth are known; and a pool that is emptied."""

from __future__ import annotations

import pytest

from harness.memory.record import Record, Storage
from harness.planner.tracing.allocator import replay
from harness.planner.tracing.extrapolate import Deeper, NotAlike, extrapolate_blocks
from harness.planner.tracing.streams import Border, stream_from_data, stream_to_data

MIB = 2**20


class Toy:
    """A training of two groups of blocks: weights, steps with kept inputs, an optimizer that works
    on all weights at once, and gradients that live until the step's end."""

    def __init__(self, counts: tuple[int, int], odd: int = -1) -> None:
        self.record, self.borders, self.odd = Record([], [], []), [], odd
        self.blocks = [(group, index) for group in (0, 1) for index in range(counts[group])]
        self.counts = counts
        self.enter("load")
        self.weights = [self.make("head", 3)]
        for group, _ in self.blocks:
            self.weights += [self.make("weight", 5 + group), self.make("bias", 1, 1000)]
        self.weights.append(self.make("tail", 7))
        self.record.emptied.append(len(self.record.events))
        self.state: list[int] = []
        for _ in range(2):
            self.step()

    def enter(self, phase: str) -> None:
        self.record.marks.append((len(self.record.events), phase))

    def border(self, group: int, index: int) -> None:
        self.borders.append(Border(len(self.record.events), group, index, ""))

    def make(self, op: str, size: int, unit: int = MIB) -> int:
        self.record.storages.append(Storage(size * unit, "device", "", op, "here:1"))
        self.record.events.append((1, len(self.record.storages) - 1))
        return len(self.record.storages) - 1

    def free(self, *storages: int) -> None:
        self.record.events += [(-1, storage) for storage in storages]

    def step(self) -> None:
        self.enter("forward")
        x, kept = self.make("embed", 2), []
        for group, index in self.blocks:
            self.border(group, index)
            wide = self.make("wide", 9 + (index == self.odd))
            out = self.make("out", 2)
            self.free(wide)
            kept.append(x)
            x = out
        self.free(x)
        gradients = self.backward(kept)
        self.optimize(gradients)

    def backward(self, kept: list[int]) -> list[int]:
        self.enter("backward")
        dx, gradients = self.make("loss", 2), []
        for group, index in reversed(self.blocks):
            self.border(group, index)
            again = self.make("wide", 9)
            gradients[:0] = [self.make("gradient", 5 + group), self.make("gradient", 1, 1000)]
            new = self.make("dx", 2)
            self.free(dx, again, kept.pop())
            dx = new
        self.free(dx)
        return gradients

    def optimize(self, gradients: list[int]) -> None:
        self.enter("optimizer")
        sizes = [self.record.storages[weight].size for weight in self.weights]
        if not self.state:
            self.state = [self.make(op, size, 1) for size in sizes for op in ("first", "second")]
        roots = [self.make("root", size, 1) for size in sizes]
        self.free(*reversed(roots))
        self.free(*gradients)

    @property
    def stream(self):
        return stream_from_data(stream_to_data(self.record, self.borders))

    @property
    def pool(self) -> list[tuple[int, int]]:
        return [(sign, size) for sign, _, size, _ in self.record.pool_events("device")]


def deep(counts: tuple[int, int], odd: int = -1) -> list[tuple[int, int]]:
    deeper = [
        Deeper(Toy((4, 2), odd).stream, counts[0]),
        Deeper(Toy((2, 4), odd).stream, counts[1]),
    ]
    return [
        (sign, size) for sign, _, size, _ in extrapolate_blocks(Toy((2, 2), odd).stream, deeper)
    ]


@pytest.mark.parametrize("counts", [(3, 3), (4, 9), (7, 30)])
def test_allocations_of_all_blocks_are_told_from_shallow_models(counts):
    whole = Toy(counts)
    assert deep(counts) == whole.pool
    assert (0, 0) in whole.pool


def test_allocations_of_another_depth_are_not_the_same():
    assert deep((4, 9)) != Toy((4, 8)).pool


def test_a_longer_stream_without_the_base_is_refused():
    short, long = Toy((2, 2)), Toy((4, 2))
    long.record.marks.insert(1, (long.record.marks[1][0], "prepare"))
    with pytest.raises(NotAlike):
        extrapolate_blocks(short.stream, [Deeper(long.stream, 9)])


def test_an_emptied_pool_gives_its_free_segments_back():
    made = [(1, 0, 40 * MIB), (1, 1, 12 * MIB), (-1, 0, 40 * MIB)]
    later = [(1, 2, 50 * MIB)]
    assert replay([*made, *later]).reserved == 102 * MIB
    assert replay([*made, (0, 0, 0), *later]).reserved == 62 * MIB

"""Where in a traced step a block begins, forward or backward, and the fullest instant of each part.

A step of a deep model repeats what it does for a block. Cut at the blocks' borders, each part of a
step grows in a straight line with the number of blocks, whichever part is the fullest in the end:
so a shallow model tells of a deep one (``harness.predict.tracing.extend``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from harness.memory.record import Record
from harness.predict.tracing.trace import StoragelessTracer
from strategies.engine import Trained

__all__ = ["Border", "Part", "bordered", "parts"]


class Border(NamedTuple):
    """Where a block begins: the event, the number of its group, its index there, and whether it is
    the first or the last of its group, or one between."""

    event: int
    group: int
    index: int
    place: str


@dataclass
class Part:
    """The fullest instant of the parts of one name: bytes, by category, and the event; and the most
    ``beyond`` the training's state, perhaps at another."""

    bytes: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    event: int = 0
    beyond: int = 0


@contextlib.contextmanager
def bordered(trained: Trained, borders: list[Border], record: Record) -> Iterator[None]:
    """While it lasts, ``borders`` is told where each block begins."""
    handles = []
    for number, group in enumerate(trained.subject.groups(trained.module)):
        for index, block in enumerate(group):
            place = "first" if index == 0 else "last" if index == len(group) - 1 else "between"
            note = _note(borders, record, number, index, place)
            handles.append(block.register_forward_pre_hook(note))
            handles.append(block.register_forward_hook(_at_gradient(note)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(borders: list[Border], record: Record, *which: Any) -> Any:
    def note(*_: Any) -> None:
        borders.append(Border(len(record.events), *which))

    return note


def _at_gradient(note: Any) -> Any:
    """A forward hook: backward of a block begins where its output's gradient is there."""

    def after(_: Any, __: Any, out: Any) -> None:
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient: note())

    return after


def parts(
    tracer: StoragelessTracer,
    borders: list[Border],
    pool: str,
    steady_from: int,
    beyond: Container[str] = (),
) -> dict[str, Part]:
    """Name of a part (step, phase, block) -> its fullest instant in ``pool``. The step is "2" from
    the event ``steady_from`` on, "1" before. ``beyond``: the categories that are not state."""
    record = tracer.record
    blocks = [(one.event, 1, "", f"{one.group}.{one.place}") for one in borders]
    cuts = sorted([*((at, 0, phase, "") for at, phase in record.marks), *blocks])
    found: dict[str, Part] = {}
    sums: dict[str, int] = {}
    total, more, phase, block, cut = 0, 0, "", "", 0
    for event, (sign, index) in enumerate(record.events):
        while cut < len(cuts) and cuts[cut][0] <= event:
            phase, block = cuts[cut][2] or phase, cuts[cut][3]
            cut += 1
        storage = record.storages[index]
        if not storage.within(pool):
            continue
        total += sign * storage.size
        more += sign * storage.size if storage.kind in beyond else 0
        sums[storage.kind] = sums.get(storage.kind, 0) + sign * storage.size
        name = f"{1 + (event >= steady_from)}/{phase}/{block}"
        part = found.setdefault(name, Part())
        part.beyond = max(part.beyond, more)
        if total > part.bytes:
            part.bytes, part.kinds, part.event = total, dict(sums), event
    return found

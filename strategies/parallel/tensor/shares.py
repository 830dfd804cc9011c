"""Which part of a weight a rank holds, where neighbours cut it among themselves.

Imports torch: import it only where it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strategies import initial
from strategies.base import BadInput

__all__ = ["Share", "held", "share_of"]


@dataclass(frozen=True, kw_only=True)
class Share:
    """The ``index``-th of ``parts`` equal parts of a parameter of ``shape``, along ``axis``.

    ``packed``: so many matrices lie behind one another along the axis (queries, keys, values), and
    each is cut, so that a rank has all three of its own heads.
    """

    shape: torch.Size
    axis: int
    index: int
    parts: int
    packed: int = 1

    def __post_init__(self) -> None:
        length = self.shape[self.axis]
        if length % (self.parts * self.packed):
            raise BadInput(
                f"tp: a weight of {' x '.join(map(str, self.shape))} is not {self.parts} equal "
                f"parts along its {length}; take another ranks"
            )

    def part(self, whole: Tensor) -> Tensor:
        """This part of the ``whole``; a view where it can be one."""
        dealt = whole.unflatten(self.axis, (self.packed, self.parts, -1))
        return dealt.select(self.axis + 1, self.index).flatten(self.axis, self.axis + 1)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole, from the parts of all ranks in their order."""
        each = [part.unflatten(self.axis, (self.packed, -1)) for part in parts]
        return torch.stack(each, self.axis + 1).flatten(self.axis, self.axis + 2)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(start, offset, numel) of what lies in one piece: from ``start`` of the flattened part,
        from ``offset`` of the flattened whole."""
        rows = self.shape[: self.axis].numel() * self.packed
        numel = self.shape.numel() // (rows * self.parts)
        for row in range(rows):
            yield row * numel, (row * self.parts + self.index) * numel, numel

    def boxes(self, first: int, rows: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """(start, rows, offsets) of what is one box of the whole, of so many ``rows`` of the part
        from ``first``: from the ``start``-th of these rows, at these ``offsets`` in the whole."""
        offsets = [0] * len(self.shape)
        if self.axis > 0:
            offsets[self.axis] = self.shape[self.axis] // self.parts * self.index
            yield 0, rows, (first, *offsets[1:])
            return
        length = self.shape[0] // (self.parts * self.packed)
        for block in range(self.packed):
            low, high = max(first, block * length), min(first + rows, (block + 1) * length)
            if low < high:
                there = (block * (self.parts - 1) + self.index) * length + low
                yield low - first, high - low, (there, *offsets[1:])


def share_of(parameter: Any) -> Share | None:
    """What ``parameter`` is a part of; None where it is whole."""
    return getattr(parameter, "share", None)


def held(p: nn.Parameter, axis: int, index: int, parts: int, packed: int = 1) -> nn.Parameter:
    """A parameter that is a part of ``p``, as ``Share`` says: drawn whole and cut then, where it
    has no value yet."""
    share = Share(shape=p.shape, axis=axis, index=index, parts=parts, packed=packed)

    def kept(whole: Tensor) -> nn.Parameter:
        # A view would keep the whole alive.
        return nn.Parameter(share.part(whole.detach()).clone(memory_format=torch.contiguous_format))

    if initial.pending(p) is None:
        new = kept(p)
    else:
        with initial.valueless():
            new = kept(p)
        initial.hand_on(p, new, kept, like=p)
    new.requires_grad_(p.requires_grad)
    new.share = share
    return new

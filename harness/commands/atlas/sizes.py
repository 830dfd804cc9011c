"""Samples that grow: the next size that does not fit is sought among them. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from harness.resolve import Resolved, resolve

__all__ = ["DOUBLINGS", "Size", "larger", "name_of"]

DOUBLINGS = 3
"""How often the elements of a sample are doubled at the most, until one does not fit."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A row whose sample has ``times`` the elements of the usual one."""

    row: Resolved
    times: float

    @property
    def name(self) -> str:
        """Its pixels and frames."""
        return name_of(self.row)


def name_of(row: Resolved) -> str:
    """The pixels and frames of a row's sample."""
    return row.subject.size_in_words.partition(",")[0]


def larger(row: Resolved, doublings: int) -> Iterator[Size]:
    """Samples of twice the elements, of four times, ...: more frames of a video, larger sides of an
    image."""
    subject = row.subject
    sizes = subject.samples_up("frames") or subject.samples_up("resolution")
    for power in range(1, doublings + 1):
        found = next((pair for pair in sizes if pair[1] >= 2**power), None)
        if found is None:
            return
        fields, times = found
        yield Size(row=resolve(dataclasses.replace(row.spec, **fields)), times=times)

"""Samples that grow: the next size that does not fit is sought among them. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from harness.resolve import Resolved, resolve

__all__ = ["DOUBLINGS", "larger"]

DOUBLINGS = 3
"""How often the elements of a sample are doubled at the most, until one does not fit."""


def larger(row: Resolved, doublings: int) -> Iterator[Resolved]:
    """The row with samples of twice the elements, of four times, ...: more frames of a video,
    larger sides of an image."""
    subject = row.subject
    sizes = subject.samples_up("frames") or subject.samples_up("resolution")
    for times in range(1, doublings + 1):
        found = next((fields for fields, weight in sizes if weight >= 2**times), None)
        if found is None:
            return
        yield resolve(dataclasses.replace(row.spec, **found))

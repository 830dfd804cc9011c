"""The next size of a sample that does not fit: each that is named was predicted by itself. No
torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from harness.predict.verdict import Fit
from harness.resolve import Resolved, resolve

__all__ = ["DOUBLINGS", "larger", "too_large"]

DOUBLINGS = 3
"""How often the elements of a sample are doubled at the most, until one does not fit."""
Ask = Callable[[list[Resolved]], Sequence[Fit]]


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


def too_large(fit: Fit, ask: Ask, doublings: int = DOUBLINGS) -> list[Fit]:
    """Fits of growing samples, up to the first that does not fit; the last may fit too, and none is
    tried where the usual size does not."""
    tried: list[Fit] = []
    if not fit.fits:
        return tried
    for row in larger(fit.resolved, doublings):
        tried += ask([row])
        if not tried[-1].fits:
            break
    return tried

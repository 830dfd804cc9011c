"""The next size of one cell that does not fit: traced, or told by two traces. No torch.

In each phase of a step what lives grows in a straight line with a sample's elements, or more
steeply where another of its instants becomes the fullest: what lies between two traces needs what
a line through them says, or less. Such a line decides where it is clearly beyond the card or short
of it; elsewhere the size is traced. ``tests/bench/between_sizes.py`` sets lines beside traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.commands.atlas.sizes import Size
from harness.predict.verdict import Fit

__all__ = ["ABOVE", "BELOW", "Edge", "between"]

ABOVE, BELOW = 0.08, 0.18
"""By what share of what a line says more may be needed (what the allocator rounds and cannot use
lies on no line: 6 % seen), and less (13 % seen); of 257 sizes that an atlas had traced because they
were near."""


@dataclass(kw_only=True)
class Edge:
    """Growing samples beyond the ``usual`` one, and the fits of those that were ``traced``: the
    largest first, then what its line leaves open."""

    usual: Fit
    sizes: Sequence[Size]
    traced: dict[int, Fit] = field(default_factory=dict)

    @property
    def open(self) -> int | None:
        """The place among the sizes of the one to trace next; None where the edge is known."""
        if not self.traced:
            return len(self.sizes) - 1 if self.sizes else None
        at = self._first
        return at if at is not None and self._fits(at) is None else None

    @property
    def too_large(self) -> str:
        """The smallest sample that does not fit, or beyond what all do; empty where no larger one
        was asked for or could be traced."""
        if not self.sizes:
            return ""
        at = self._first
        if at is None:
            return f"above {self.sizes[-1].name}"
        known = at not in self.traced or self.traced[at].verdict != "unknown"
        return self.sizes[at].name if known else ""

    @property
    def _first(self) -> int | None:
        """The first size that is not known to fit."""
        return next((at for at in range(len(self.sizes)) if not self._fits(at)), None)

    def _fits(self, at: int) -> bool | None:
        """Whether a size fits; None where nothing tells."""
        if any(fit.fits for place, fit in self.traced.items() if place >= at):
            return True
        if any(not fit.fits for place, fit in self.traced.items() if place <= at):
            return False
        below = max((place for place in self.traced if place < at), default=-1)
        above = min(place for place in self.traced if place > at)
        ends = self._times(below), self._times(above)
        share = (self._times(at) - ends[0]) / (ends[1] - ends[0])
        return _clearly(self.traced.get(below, self.usual), self.traced[above], share)

    def _times(self, at: int) -> float:
        return 1.0 if at < 0 else self.sizes[at].times


def _clearly(small: Fit, large: Fit, share: float) -> bool | None:
    need, has = between(small, large, share), small.gpu.memory_bytes
    if need is None:
        return None
    if (1 + ABOVE) * need <= has:
        return True
    return False if (1 - BELOW) * need > has else None


def between(small: Fit, large: Fit, share: float) -> float | None:
    """Bytes that a sample needs at the least which lies this ``share`` of the way between two that
    were traced; None where one could not be, or where attention keeps its scores, which grow with
    the square."""
    ends = small.prediction, large.prediction
    least = small.least_bytes, large.least_bytes
    if None in least or any("math" in one.attention or not one.phases for one in ends):
        return None

    def line(begin: float, end: float) -> float:
        return begin + share * (end - begin)

    phases, others = (one.phases for one in ends)
    lives = max(line(size, others.get(name, size)) for name, size in phases.items())
    beside = (need - max(one.phases.values()) for need, one in zip(least, ends, strict=True))
    return lives + line(*beside)

"""The next size of one cell that does not fit: traced, or told by other traces. No torch.

In each phase of a step what lives grows in a straight line with a sample's elements, or more
steeply where another of its instants becomes the fullest: what lies between two traces needs what
a line through them says, or less. Such a line decides where it is clearly beyond the card or short
of it; elsewhere the size is traced. What activations grow by is told, too, by trainings that differ
in their sharding alone. ``tests/bench/between_sizes.py`` sets both beside traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.commands.atlas.sizes import Size
from harness.predict.verdict import Fit

__all__ = ["ABOVE", "BELOW", "KIN", "ROUNDED", "Edge", "Told", "between"]

ABOVE, BELOW = 0.08, 0.18
"""By what share of what a line says more may be needed (what the allocator rounds and cannot use
lies on no line: 6 % seen), and less (13 % seen), by ``tests/bench/between_sizes.py``."""
ROUNDED = (0.12, 0.02)
"""Both where no line is between, for activations are known at that very size: 9 % more seen, and
never less."""
KIN = (0.06, 0.06)
"""Both where the same recipe was traced at both sizes on other cards, or more of them: 4.4 % more
seen, and 4.2 % less."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """Bytes that a size needs at the most and at the least, which may both be off: by what shares
    more is needed, and less."""

    most: float
    least: float
    margins: tuple[float, float] = (ABOVE, BELOW)

    def clearly(self, *known: Fit) -> bool | None:
        """Whether it fits, by the upper end of its need; None where nothing tells. These are needs
        at the least, and ``known`` fits of the recipe say by how much more the allocator reserves.
        """
        above, below = self.margins
        has = known[0].capacity_bytes
        if (1 + above) * self.most * max(fit.need_bytes / fit.least_bytes for fit in known) <= has:
            return True
        return False if (1 - below) * self.least > has else None


@dataclass(kw_only=True)
class Edge:
    """Growing samples beyond the ``usual`` one, and the fits of those that were ``traced``: what is
    left open by its ``kin``, the same recipe on other cards, and by those that are ``alike`` in
    their activations; where nothing is known of them, the largest first, then what its line leaves
    open."""

    usual: Fit
    sizes: Sequence[Size]
    traced: dict[int, Fit] = field(default_factory=dict)
    alike: Sequence[Edge] = field(default=(), repr=False, compare=False)
    kin: Sequence[Edge] = field(default=(), repr=False, compare=False)

    @property
    def open(self) -> int | None:
        """The place among the sizes of the one to trace next; None where the edge is known."""
        at = self._first
        if at is None or self._fits(at) is not None:
            return None
        return at if self.traced or self.as_alike(at) else len(self.sizes) - 1

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

    def as_alike(self, at: int) -> Told | None:
        """What a size needs by how the activations of what is alike grew from the size below that
        was traced here: these are added to its fullest instant; or to what lives between steps, for
        the fullest may be one without them. None where nothing tells."""
        below = self._below(at)
        small, found = self.traced.get(below, self.usual), self._grown(below, at)
        if found is None or not _straight(small):
            return None
        (lives, unused), margins = found
        most = small.least_bytes + lives + max(0, unused)
        standing = small.least_bytes - small.prediction.least
        least = small.prediction.between + _activations(small) - _kept(small) + lives + standing
        return Told(most=most, least=least, margins=margins)

    def as_kin(self, at: int) -> Told | None:
        """What a size needs by how the need of its kin grew from the size below that was traced
        here; None where nothing tells."""
        below = self._below(at)
        small = self.traced.get(below, self.usual)
        for ends in (other._ends(below, at) for other in self.kin if other is not self):
            if ends and _straight(small):
                need = small.least_bytes + ends[1].least_bytes - ends[0].least_bytes
                return Told(most=need, least=need, margins=KIN)
        return None

    def _ends(self, below: int, at: int) -> tuple[Fit, Fit] | None:
        """Two sizes, where both were traced and lie on a line."""
        small, large = (self.usual if n < 0 else self.traced.get(n) for n in (below, at))
        return (small, large) if small and large and _straight(small, large) else None

    def _grown(self, below: int, at: int) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """By how much activations grow from one size to another, and what the allocator cannot use,
        and how far the need may be off: as both were traced of what is alike, or by its line."""
        for ends in (other._ends(below, at) for other in self.alike if other is not self):
            if ends:
                return _apart(*ends), ROUNDED
        known = [each for other in self.alike if (each := other.growth)]
        if not known:
            return None
        times = self._times(at) - self._times(below)
        return (times * known[0][0], times * known[0][1]), (ABOVE, BELOW)

    @property
    def growth(self) -> tuple[float, float] | None:
        """Bytes that activations grow by with a usual sample's elements up to the largest size, and
        what the allocator cannot use; None where that was not traced, or lies on no line."""
        last = len(self.sizes) - 1
        if last not in self.traced or not _straight(self.usual, self.traced[last]):
            return None
        lives, unused = _apart(self.usual, self.traced[last])
        times = self._times(last) - 1
        return lives / times, unused / times

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
        told = self._clearly(self.as_kin(at))
        if told is not None:
            return told
        below, above = self._below(at), min((n for n in self.traced if n > at), default=None)
        if above is None:
            return self._clearly(self.as_alike(at))
        ends = self._times(below), self._times(above)
        share = (self._times(at) - ends[0]) / (ends[1] - ends[0])
        return _told_by_line(self.traced.get(below, self.usual), self.traced[above], share)

    def _below(self, at: int) -> int:
        """The largest smaller size that was traced; before all sizes the usual one."""
        return max((place for place in self.traced if place < at), default=-1)

    def _times(self, at: int) -> float:
        return 1.0 if at < 0 else self.sizes[at].times

    def _clearly(self, told: Told | None) -> bool | None:
        known = [self.usual, *(fit for fit in self.traced.values() if fit.least_bytes)]
        return told.clearly(*known) if told else None


def _activations(fit: Fit) -> int:
    """The most beyond the state while a sample is computed with."""
    return max(fit.prediction.beyond.get(phase, 0) for phase in ("forward", "backward"))


def _kept(fit: Fit) -> int:
    """Buckets that are beyond the state, and stay between steps: counted twice by both."""
    found = fit.prediction
    beyond = found.buckets == "workspace" and found.peak is not None
    return found.peak.categories.get("buckets", 0) if beyond else 0


def _apart(small: Fit, large: Fit) -> tuple[int, int]:
    """What the activations of a sample take more than another's, and what the allocator cannot use
    more."""
    unused = [one.prediction.least - max(one.prediction.phases.values()) for one in (small, large)]
    return _activations(large) - _activations(small), unused[1] - unused[0]


def _told_by_line(small: Fit, large: Fit, share: float) -> bool | None:
    need = between(small, large, share)
    return None if need is None else Told(most=need, least=need).clearly(small, large)


def _straight(*fits: Fit) -> bool:
    """Whether what they need lies on a line: all were traced, and no attention keeps its scores,
    which grow with the square."""
    return all(
        fit.least_bytes is not None and fit.prediction.phases
        and "math" not in fit.prediction.attention
        for fit in fits
    )  # fmt: skip


def between(small: Fit, large: Fit, share: float) -> float | None:
    """Bytes that a sample needs at the least which lies this ``share`` of the way between two that
    were traced; None where nothing lies on a line."""
    if not _straight(small, large):
        return None
    ends = small.prediction, large.prediction
    least = small.least_bytes, large.least_bytes

    def line(begin: float, end: float) -> float:
        return begin + share * (end - begin)

    phases, others = (one.phases for one in ends)
    lives = max(line(size, others.get(name, size)) for name, size in phases.items())
    beside = (need - max(one.phases.values()) for need, one in zip(least, ends, strict=True))
    return lives + line(*beside)

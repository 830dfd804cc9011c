"""Whether GPUs ran freely beside the timed steps, by their samples."""

from __future__ import annotations

from collections.abc import Sequence

from harness.result import GpuSample

__all__ = ["hindered"]

CLOCK_LIMIT = 0.05
"""Share by which a clock may fall from before the timed steps to after them."""


def hindered(samples: Sequence[GpuSample]) -> list[str]:
    """What was in the way of a run's GPUs, a few words each; empty if nothing was, or nothing is
    known. A clock that is low alike before and after is the card's, or its owner's wish."""
    names = sorted({(s.index, reason) for s in samples for reason in s.held_back_by})
    words = [f"GPU {index} held back by {reason}" for index, reason in names]
    words += [
        f"GPU {index} shared by {most} processes"
        for index, most in _most_processes(samples).items()
        if most > 1
    ]
    for index, (before, after) in _clocks(samples).items():
        if before and after and after < before * (1 - CLOCK_LIMIT):
            words.append(f"GPU {index} clock {before / 1e6:.0f} -> {after / 1e6:.0f} MHz")
    return words


def _most_processes(samples: Sequence[GpuSample]) -> dict[int, int]:
    """GPU -> the most processes that were seen on it; the run has one on each."""
    indices = sorted({s.index for s in samples})
    return {i: max(s.processes for s in samples if s.index == i) for i in indices}


def _clocks(samples: Sequence[GpuSample]) -> dict[int, tuple[int, int]]:
    """GPU -> its clock before and after the timed steps, in Hz; 0 where not known."""
    known = {(s.index, s.when): s.sm_clock_hz for s in samples}
    indices = sorted({s.index for s in samples})
    return {i: (known.get((i, "before"), 0), known.get((i, "after"), 0)) for i in indices}

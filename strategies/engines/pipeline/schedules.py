"""Schedules of torch.distributed.pipelining, and the share of a step that stages wait. No torch at
import."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Schedule:
    """A schedule of torch: ``kind`` is its class. ``runs``: runs of blocks a stage, which lie apart
    in the model."""

    kind: str
    runs: int = 1

    def fault(self, stages: int, micro: int) -> str | None:
        """Return why ``micro`` micro-batches cannot run on so many stages, with a hint; or None."""
        if self.kind == "Schedule1F1B" and micro < stages:
            return f"1f1b fills {stages} stages with as many micro batches; take micro={stages}"
        rounds = max(1, micro // stages)
        if self.runs > 1 and micro % rounds:
            # torch 2.13's own condition, which it raises in each rank.
            ways = f"micro={micro // rounds * rounds} or {micro - micro % stages + stages}"
            return f"{micro} micro batches are not {rounds} equal rounds; take {ways}"
        return None


SCHEDULES = {
    "gpipe": Schedule("ScheduleGPipe"),  # Huang et al. 2019 (arXiv:1811.06965)
    "1f1b": Schedule("Schedule1F1B"),  # Narayanan et al. 2019 (PipeDream, SOSP)
    "interleaved": Schedule("ScheduleInterleaved1F1B", runs=2),  # the same, 2021 (arXiv:2104.04473)
}


def dealt(depth: int, runs: int) -> list[tuple[int, int]]:
    """Return (first block, end) of each run: equal runs, or the first ones one block longer."""
    size, longer = divmod(depth, runs)
    ends = [n * size + min(n, longer) for n in range(runs + 1)]
    return [*itertools.pairwise(ends)]


def bubble_fraction(stages: int, runs: int, micro: int) -> Fraction:
    """Return the time that a stage waits in a step, as a multiple of the time that it computes:
    (N - 1) / M for gpipe and 1f1b (arXiv:1811.06965), (N - 1) / VM for V runs (arXiv:2104.04473).
    """
    return Fraction(stages - 1, runs * micro)

"""The orders in which stages run the micro batches of a step. No torch above."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

__all__ = ["AUTO", "SCHEDULES", "Schedule", "dealt"]

AUTO = "auto"
"""Runs of blocks a stage where a recipe says nothing: one, or the fewest of an order of several."""


@dataclass(frozen=True)
class Schedule:
    """``kind`` is torch's class of it (``torch.distributed.pipelining``), ``source`` its paper.

    ``several``: a stage has several runs of blocks, which lie apart in the model; ``folded``: it
    has two, the second of which come in the opposite order, so that the first stage has both ends
    of the model; ``split``: gradients of weights are computed apart from, and later than, those of
    what came in.
    """

    kind: str
    source: str
    several: bool = False
    folded: bool = False
    split: bool = False

    def make(self, stages: list[Any], micro: int, loss: Any) -> Any:
        """torch's schedule of ``micro`` micro batches for torch's stages of this rank.
        ``loss(output, target)`` is a micro batch's mean, so that gradients are divided by
        ``micro``."""
        from torch.distributed import pipelining

        given = stages if self.several else stages[0]
        return getattr(pipelining, self.kind)(given, micro, loss_fn=loss, scale_grads=True)

    def runs(self, asked: Any) -> int:
        """Runs of blocks a stage, of which ``asked`` were asked for."""
        if asked == AUTO:
            return 2 if self.several else 1
        return asked

    def homes(self, stages: int, runs: int) -> tuple[int, ...]:
        """The stage of each run of blocks, in the order in which they run."""
        there = [*range(stages)]
        turns = (there[::-1] if self.folded and turn % 2 else there for turn in range(runs))
        return tuple(stage for turn in turns for stage in turn)

    def fault(self, stages: int, runs: int, micro: int) -> str | None:
        """Why so many micro batches cannot run on so many stages, with the way out."""
        if self.kind == "Schedule1F1B" and micro < stages:
            return f"1f1b fills {stages} stages with as many micro batches; take micro={stages}"
        if self.folded and runs != 2:
            return f"zbv folds two runs of blocks a stage, not {runs}; take runs=2, or zero_bubble"
        if not self.several and runs != 1:
            return f"its stages have one run of blocks, not {runs}; take schedule=interleaved"
        if self.several and not self.split and runs == 1:
            return "interleaved is of several runs of blocks a stage; take runs=2, or schedule=1f1b"
        rounds = max(1, micro // stages)
        if self.several and not self.folded and micro % rounds:
            # torch 2.13's own condition, which it raises in each rank.
            ways = f"micro={micro // rounds * rounds} or {micro - micro % stages + stages}"
            return f"{micro} micro batches are not {rounds} equal rounds; take {ways}"
        return None


SCHEDULES = {
    "gpipe": Schedule("ScheduleGPipe", "Huang et al. 2019 (arXiv:1811.06965)"),
    "1f1b": Schedule("Schedule1F1B", "Narayanan et al. 2019 (PipeDream, SOSP)"),
    "interleaved": Schedule(
        "ScheduleInterleaved1F1B", "Narayanan et al. 2021 (arXiv:2104.04473)", several=True
    ),
    "zero_bubble": Schedule(
        "ScheduleInterleavedZeroBubble",
        "Qi et al. 2023, ZB1P (arXiv:2401.10241)",
        several=True,
        split=True,
    ),
    "zbv": Schedule(
        "ScheduleZBVZeroBubble",
        "Qi et al. 2023, section 6 (arXiv:2401.10241)",
        several=True,
        folded=True,
        split=True,
    ),
}


def dealt(depth: int, runs: int) -> list[tuple[int, int]]:
    """The first block of each run and that behind its last: equal runs, or the first ones a block
    longer."""
    size, longer = divmod(depth, runs)
    ends = [n * size + min(n, longer) for n in range(runs + 1)]
    return [*itertools.pairwise(ends)]

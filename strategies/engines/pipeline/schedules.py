"""Orders in which stages run the micro-batches of a step; bubble and micro-batches in flight.

Orders of several runs of blocks a stage are read from torch's own schedules, made for placeholder
stages. No torch at import.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

AUTO = "auto"
"""Default ``runs`` of a recipe: one a stage, or two for schedules of several runs."""


@dataclass(frozen=True)
class Schedule:
    """A schedule of torch. ``kind`` is its class in ``torch.distributed.pipelining``, ``source``
    its paper.

    ``several``: a stage has several runs of blocks, which lie apart in the model. ``folded``: it
    has two runs, the second in opposite order, so the first stage has both ends of the model.
    ``split``: gradients of weights are computed later than gradients of inputs.
    """

    kind: str
    source: str
    several: bool = False
    folded: bool = False
    split: bool = False

    def make(self, stages: list[Any], micro: int, loss: Any) -> Any:
        """Return torch's schedule of ``micro`` micro-batches for torch's stages of this rank.
        ``loss(output, target)`` is a micro-batch's mean, so gradients are divided by ``micro``."""
        from torch.distributed import pipelining

        given = stages if self.several else stages[0]
        return getattr(pipelining, self.kind)(given, micro, loss_fn=loss, scale_grads=True)

    def runs(self, asked: Any) -> int:
        """Return the runs of blocks a stage for ``asked`` of a recipe."""
        if asked == AUTO:
            return 2 if self.several else 1
        return asked

    def homes(self, stages: int, runs: int) -> tuple[int, ...]:
        """Return the stage of each run of blocks, in the order in which they run."""
        there = [*range(stages)]
        turns = (there[::-1] if self.folded and turn % 2 else there for turn in range(runs))
        return tuple(stage for turn in turns for stage in turn)

    def fault(self, stages: int, runs: int, micro: int) -> str | None:
        """Return why ``micro`` micro-batches cannot run on so many stages, with a hint; or None."""
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
    """Return (first block, end) of each run: equal runs, or the first ones one block longer."""
    size, longer = divmod(depth, runs)
    ends = [n * size + min(n, longer) for n in range(runs + 1)]
    return [*itertools.pairwise(ends)]


FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"
"""Work on a micro-batch; ``WEIGHTS`` only if gradients of weights are computed separately."""
WORDS = {
    "FORWARD": FORWARD,
    "FULL_BACKWARD": BACKWARD,
    "BACKWARD_INPUT": BACKWARD,
    "BACKWARD_WEIGHT": WEIGHTS,
}
"""torch's name of an action -> ours."""


class Part(NamedTuple):
    """Work on micro-batch ``number`` in one of the runs of blocks."""

    what: str
    run: int
    number: int

    @property
    def phase(self) -> str:
        """Its phase of the step (``strategies.engine.STEP_PHASES``)."""
        return BACKWARD if self.what == WEIGHTS else self.what


OPTIMIZER = Part("optimizer", -1, -1)
"""The optimizer's turn, after all parts of a step."""


def order(schedule: Schedule, stages: int, runs: int, micro: int) -> list[list[Part]]:
    """Return the parts that each stage runs, in order."""
    if schedule.several:
        return _torch_order(schedule, stages, runs, micro)
    first = [micro if schedule.kind == "ScheduleGPipe" else stages - n for n in range(stages)]
    return [[*_one_run(stage, min(micro, ahead), micro)] for stage, ahead in enumerate(first)]


def _one_run(stage: int, ahead: int, micro: int) -> Iterator[Part]:
    """Yield ``ahead`` forwards, then backward and forward in turn."""
    for number in range(ahead):
        yield Part(FORWARD, stage, number)
    for number in range(micro):
        yield Part(BACKWARD, stage, number)
        if ahead + number < micro:
            yield Part(FORWARD, stage, ahead + number)


def _torch_order(schedule: Schedule, stages: int, runs: int, micro: int) -> list[list[Part]]:
    homes = schedule.homes(stages, runs)
    alike: dict[str, Any] = {"num_stages": len(homes), "group_size": stages, "group_rank": 0}
    here = [n for n, home in enumerate(homes) if home == 0]
    first = [SimpleNamespace(stage_index=n, submod=None, **alike) for n in here]
    made = schedule.make(first, micro, None).pipeline_order
    actions = ([action for action in made[stage] if action] for stage in range(stages))
    return [
        [Part(WORDS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in each]
        for each in actions
    ]


def kept(parts: Sequence[Part], split: bool) -> int:
    """Return the largest number of micro-batches (of each run) whose activations a stage keeps at
    once: from forward until the gradients of weights, which ``split`` computes separately."""
    now, most, last = 0, 0, WEIGHTS if split else BACKWARD
    for part in parts:
        now += (part.what == FORWARD) - (part.what == last)
        most = max(most, now)
    return most


def bubble_fraction(schedule: Schedule, stages: int, runs: int, micro: int) -> Fraction:
    """Return the time that a stage waits in a step, as a multiple of the time that it computes.
    Runs take equally long, backward takes twice as long as forward, half of it for weights, and
    sends take no time. It is (N - 1) / M for gpipe and 1f1b (arXiv:1811.06965) and (N - 1) / VM
    for V runs (arXiv:2104.04473).

    Raises:
        ValueError: the schedule deadlocks.
    """
    left = [list(reversed(parts)) for parts in order(schedule, stages, runs, micro)]
    ends: dict[Part, int] = {}
    clocks = [0] * stages
    while any(left):
        before = len(ends)
        for stage, parts in enumerate(left):
            while parts and all(need in ends for need in _needs(parts[-1], stages * runs - 1)):
                part = parts.pop()
                arrived = [ends[need] for need in _needs(part, stages * runs - 1)]
                clocks[stage] = max([clocks[stage], *arrived]) + _length(part, schedule.split)
                ends[part] = clocks[stage]
        if len(ends) == before:
            raise ValueError(f"{schedule.kind}: each stage waits for another")
    busy = 3 * runs * micro
    return Fraction(max(clocks) - busy, busy)


def _needs(part: Part, last: int) -> list[Part]:
    """Return the parts of other stages that must end before ``part``."""
    if part.what == FORWARD and part.run > 0:
        return [part._replace(run=part.run - 1)]
    if part.what == BACKWARD and part.run < last:
        return [part._replace(run=part.run + 1)]
    return []


def _length(part: Part, split: bool) -> int:
    if part.what == FORWARD:
        return 1
    if not split:
        return 2
    # The first run has no inputs to differentiate: torch does all of its backward with the weights.
    return (part.what == WEIGHTS) * 2 if part.run == 0 else 1

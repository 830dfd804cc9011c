"""What each stage runs in a step, one part of a micro batch after the other, as its schedule has
it: how many it keeps at once, and how long it waits for the others.

Orders of several runs of blocks a stage are read off torch's own schedules, made for stages that
are not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

from strategies.engines.pipeline.schedules import Schedule

__all__ = ["BACKWARD", "FORWARD", "OPTIMIZER", "WEIGHTS", "Part", "kept", "order", "waits"]

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"
"""What is done with a micro batch: ``WEIGHTS`` where the gradients of weights come apart."""
WORDS = {
    "FORWARD": FORWARD,
    "FULL_BACKWARD": BACKWARD,
    "BACKWARD_INPUT": BACKWARD,
    "BACKWARD_WEIGHT": WEIGHTS,
}
"""torch's words for it."""


class Part(NamedTuple):
    """What is done with micro batch ``number`` in one of the runs of blocks."""

    what: str
    run: int
    number: int

    @property
    def phase(self) -> str:
        """The phase of the step that it belongs to (``strategies.engine.STEP_PHASES``)."""
        return BACKWARD if self.what == WEIGHTS else self.what


OPTIMIZER = Part("optimizer", -1, -1)
"""What follows on all parts of a step."""


def order(schedule: Schedule, stages: int, runs: int, micro: int) -> list[list[Part]]:
    """What each stage runs, in this order."""
    if schedule.several:
        return _torch_s(schedule, stages, runs, micro)
    first = [micro if schedule.kind == "ScheduleGPipe" else stages - n for n in range(stages)]
    return [[*_one_run(stage, min(micro, ahead), micro)] for stage, ahead in enumerate(first)]


def _one_run(stage: int, ahead: int, micro: int) -> Iterator[Part]:
    """So many forward ``ahead`` of the first backward; then one and one."""
    for number in range(ahead):
        yield Part(FORWARD, stage, number)
    for number in range(micro):
        yield Part(BACKWARD, stage, number)
        if ahead + number < micro:
            yield Part(FORWARD, stage, ahead + number)


def _torch_s(schedule: Schedule, stages: int, runs: int, micro: int) -> list[list[Part]]:
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
    """Micro batches, of each run of blocks, whose activations a stage keeps at most: from forward
    on until the gradients of weights are there, which ``split`` computes apart."""
    now, most, last = 0, 0, WEIGHTS if split else BACKWARD
    for part in parts:
        now += (part.what == FORWARD) - (part.what == last)
        most = max(most, now)
    return most


def waits(schedule: Schedule, stages: int, runs: int, micro: int) -> Fraction:
    """How long a stage waits in a step, as a multiple of what it computes: where all runs take
    equally long, backward twice as long as forward, half of it for weights, and sending nothing.
    (N - 1) / M of gpipe and 1f1b (arXiv:1811.06965), (N - 1) / VM of V runs (arXiv:2104.04473)."""
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
    """What another stage must have done before."""
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
    # Nobody is before the first run: torch leaves all of its backward to where weights are due.
    return (part.what == WEIGHTS) * 2 if part.run == 0 else 1
